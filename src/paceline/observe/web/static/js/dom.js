// Elements without markup: whatever is shown goes in as text, so nothing a model or a file says becomes HTML.

/**
 * h("td", {class: "right", on: {click}}, "text", child, [more children])
 * `on` are listeners, `data` is the dataset, `vars` are CSS custom properties; false, null and undefined are left out.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "vars") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

/** A box that scrolls sideways by keys too, for a table without links or buttons. */
export function scrollable(label, table) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
}

/** A sentence in which `backticks` mark code. */
export function prose(text) {
  return String(text).split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  table: "M2 3h12v10H2zM2 6.5h12M2 9.8h12M6.5 3v10",
  wide: "M9.5 2.5h4v4M6.5 13.5h-4v-4M13 3L9 7M3 13l4-4",
};

/** A small picture; the caller says in words what it means. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 16 16");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  picture.append(path);
  return picture;
}

/** A formula: a path of 100 units to the em, in the colour of the text around it; `source` is what it says. */
export function outline({ path, width, ascent, depth }, source) {
  const picture = document.createElementNS(SVG, "svg");
  const [left, right] = [4, 4]; // letters reach over their ends
  const box = { viewBox: `${-left} ${-100 * ascent} ${100 * width + left + right} ${100 * (ascent + depth)}`, width: `${width + (left + right) / 100}em`, height: `${ascent + depth}em`, role: "img", "aria-label": source };
  for (const [name, value] of Object.entries(box)) picture.setAttribute(name, value);
  picture.style.setProperty("--depth", `${-depth}em`);
  const [title, line] = ["title", "path"].map((tag) => document.createElementNS(SVG, tag));
  title.textContent = source;
  line.setAttribute("d", path);
  picture.append(title, line);
  return picture;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Put these children in place of the old ones. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/**
 * Bring a table's rows up to date: rows are known by their `data-key`, and of those that stay only cells that differ are
 * replaced, so that clicks and screen readers there are not disturbed.
 */
export function patchRows(body, rows) {
  const before = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const now = rows.map((row) => {
    const old = before.get(row.dataset.key);
    if (!old || old.cells.length !== row.cells.length) return row;
    old.className = row.className;
    [...row.cells].forEach((cell, index) => {
      if (!old.cells[index].isEqualNode(cell)) old.cells[index].replaceWith(cell);
    });
    return old;
  });
  if (now.length !== body.rows.length || now.some((row, index) => row !== body.rows[index])) body.replaceChildren(...now);
}

/** Change a text only when it differs, so that screen readers and selections are left in peace. */
export function say(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

let saidAt = 0;

/** Tell a screen reader, not more often than every few seconds unless it is urgent. */
export function announce(text, urgent = false) {
  const now = performance.now();
  if (!urgent && now - saidAt < 8000) return;
  saidAt = now;
  say(document.getElementById("said"), text);
}

/** Call `work` once per frame at most, however often it is asked for. */
export function perFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/** What a browser remembers for the user; a browser that keeps nothing is no error. */
export const memory = {
  get(key, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(key)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch {
      // Only a convenience.
    }
  },
};
