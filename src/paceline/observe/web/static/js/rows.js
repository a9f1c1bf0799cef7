// Tables one can walk through: arrow keys between rows, Enter or a click opens, Space ticks. One row is in the tab order.

/**
 * Give a table body its keys. `open(row)` and `tick(row)` are called with the row's element; the body may be filled anew at
 * any time: call the function that comes back before, and the one that it gives afterwards, so that the focus stays.
 */
export function walkable(body, { open, tick }) {
  const rows = () => [...body.rows].filter((row) => row.dataset.key !== undefined);
  let key = null;
  const reach = (row, focus) => {
    for (const other of rows()) other.tabIndex = other === row ? 0 : -1;
    key = row?.dataset.key ?? null;
    if (focus) row?.focus();
  };
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = rows();
    const here = all.indexOf(row);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined && (event.target === row || event.key.startsWith("Arrow"))) {
      event.preventDefault();
      reach(all[Math.max(0, Math.min(all.length - 1, to))], true);
    } else if (event.target === row && event.key === "Enter") open?.(row);
    else if (event.target === row && event.key === " ") {
      event.preventDefault();
      tick?.(row);
    }
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row?.dataset.key === undefined || event.target.closest("a, button, input, label, select") || String(getSelection())) return;
    open?.(row);
  });
  body.addEventListener("focusin", (event) => {
    const row = event.target.closest("tr");
    if (row?.dataset.key !== undefined) reach(row, false);
  });
  return () => {
    const had = document.activeElement?.matches("tr") && body.contains(document.activeElement);
    return () => {
      const all = rows();
      reach(all.find((row) => row.dataset.key === key) ?? all[0], had);
    };
  };
}

/** A table whose rows are cards on a phone. */
export function cards(table) {
  table.classList.add("cards");
  const headings = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) named(row, headings);
  return table;
}

/** Write the heading of its column on each cell of a row: on a phone, where rows are cards, it stands before the value. */
export function named(row, headings) {
  [...row.cells].forEach((cell, at) => (cell.dataset.heading = headings[at]));
  return row;
}
