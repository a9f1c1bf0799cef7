// The list of rollouts: filtered, sorted and paged by the server, however many there are.
import { ask } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { amount, moment, number, whole } from "../format.js";
import { replaceAddress, toRun } from "../router.js";
import { named, walkable } from "../rows.js";
import { Filters } from "./filters.js";
import { FINISH, isFiltered, measured, PAGE, pageOf, queryOf, stateMark, toList, toOne, versionWords } from "./words.js";

const METRICS = 2; // of a rollout, that a line has room for
const COUNTING = 1500; // milliseconds between two counts of what is new
const COLUMNS = [
  [null, "Rollout", "right"], ["step", "Step", "right"], [null, "Environment", "spare"], [null, "State"], ["reward", "Reward", "right"],
  [null, "Metrics", "spare"], [null, "Prompt", "spare"], [null, "Expected", "spare"], [null, "Reply"], ["advantage", "Advantage", "right spare"],
  ["tokens", "Tokens", "right"], ["turns", "Turns", "right wide"], ["ticket", "Ticket, try", "right wide"], [null, "Version", "right wide"],
];

export async function render(root, run, params) {
  const state = { query: queryOf(params), page: pageOf(params), data: null, asking: null };
  const filters = new Filters(state.query, (query) => go(query, 1));
  const counted = h("span", { class: "soft", role: "status" });
  const news = h("button", { type: "button", class: "news", hidden: true, on: { click: () => go(state.query, 1) } });
  const headings = COLUMNS.map(([key, label, side]) => h("th", { scope: "col", class: side },
    key ? h("button", { type: "button", on: { click: () => sortBy(key) } }, label) : label));
  const body = h("tbody");
  const list = h("div", { class: "scroll" }, h("table", { class: "list rollouts cards" },
    h("caption", { class: "unseen" }, "Rollouts. Arrow keys go from row to row, Enter opens one."),
    h("thead", {}, h("tr", {}, headings)), body));
  const empty = h("div");
  const notices = h("div");
  const pager = h("nav", { class: "row pager", "aria-label": "Pages of the list" });
  const league = h("a", { href: toRun(run.name, "rollouts", { view: "league" }), hidden: true }, "League");
  fill(root, h("div", { class: "head" }, h("h1", {}, "Rollouts"), counted, h("span", { "aria-live": "polite" }, news), h("span", { class: "grow" }), league),
    h("div", { class: "stack" }, notices, filters.element, list, empty, pager));
  const keepFocus = walkable(body, { open: (row) => (location.hash = toOne(run, row.dataset.key, state.query)) });

  /** Show another page or another query, and say so in the address. */
  async function go(query, page) {
    state.query = { ...query };
    state.page = page;
    replaceAddress(toList(run, state.query, page));
    await read().catch(fail);
  }

  function sortBy(key) {
    const now = state.query.sort ?? "-step";
    const sort = now === `-${key}` ? key : `-${key}`;
    const { sort: _, ...rest } = state.query;
    filters.query = sort === "-step" ? rest : { ...rest, sort };
    go(filters.query, 1);
  }

  async function read() {
    state.asking?.abort();
    const asking = (state.asking = new AbortController());
    root.setAttribute("aria-busy", "true");
    const data = await ask("rollouts", { run: run.name, ...state.query, offset: (state.page - 1) * PAGE, limit: PAGE }, asking.signal);
    root.removeAttribute("aria-busy");
    state.data = data;
    draw();
    announce(`${amount(data.total, "rollout")} found`, true);
  }

  function fail(error) {
    if (error.name === "AbortError") return;
    root.removeAttribute("aria-busy");
    fill(empty, h("div", { class: "notice bad", role: "alert" }, h("p", {}, error.message)));
    list.hidden = pager.hidden = true;
    say("");
  }

  function say(text) {
    counted.textContent = text;
  }

  function draw() {
    const { data, query } = state;
    filters.offer(data.counts);
    league.hidden = !data.league;
    news.hidden = true;
    say(data.total === data.all ? `${whole(data.all)} in all` : `${whole(data.total)} of ${whole(data.all)}`);
    const sort = query.sort ?? "-step";
    COLUMNS.forEach(([key, label], at) => {
      const chosen = key && sort.replace("-", "") === key;
      if (chosen) headings[at].setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
      else headings[at].removeAttribute("aria-sort");
      if (key) headings[at].firstChild.textContent = label + (chosen ? (sort.startsWith("-") ? " ↓" : " ↑") : "");
    });
    const refocus = keepFocus();
    fill(body, data.rows.map((row) => line(run, row, query)));
    refocus();
    list.hidden = !data.rows.length;
    fill(notices, notes(data));
    fill(empty, data.rows.length ? null : nothing(run, data, query, state.page, () => go(query, 1)));
    drawPager(data.total);
  }

  function drawPager(total) {
    const last = Math.max(1, Math.ceil(total / PAGE));
    pager.hidden = last === 1;
    const first = (state.page - 1) * PAGE;
    const button = (label, page, may) => h("button", { type: "button", disabled: !may, on: { click: () => turn(page) } }, label);
    fill(pager, button("First", 1, state.page > 1), button("Previous", state.page - 1, state.page > 1),
      h("span", { class: "soft" }, `${whole(first + 1)} to ${whole(Math.min(total, first + PAGE))}, page ${whole(state.page)} of ${whole(last)}`),
      button("Next", state.page + 1, state.page < last), button("Last", last, state.page < last));
  }

  async function turn(page) {
    await go(state.query, page);
    scrollTo(0, 0);
    body.rows[0]?.focus();
  }

  let again = 0;
  /** How many came since the list was read; the list itself stays as it is under the reader's eyes. */
  function later() {
    if (again) return;
    again = setTimeout(async () => {
      again = 0; // what comes while this is asked is counted again
      const { query, data } = state;
      const now = await ask("rollouts", { run: run.name, ...query, limit: 0 }).catch(() => null);
      if (!now || data !== state.data || !data) return;
      const more = now.total - data.total;
      if (more && !data.rows.length) return go(query, 1);
      news.hidden = !more;
      news.textContent = more > 0 ? `${whole(more)} new: show` : "The run went back: show again";
    }, COUNTING);
  }

  await read().catch((error) => {
    if (error.name !== "AbortError") throw error; // else the reader asked for something else meanwhile, and gets that
  });
  const end = run.on("files", later);
  return () => {
    end();
    clearTimeout(again);
    state.asking?.abort();
  };
}

function line(run, row, query) {
  const who = [row.env, row.actor !== "policy" ? row.actor : "", row.kind].filter(Boolean).join(" · ");
  return named(h("tr", { data: { key: row.index }, tabindex: -1 },
    h("td", { class: "right" }, h("a", { href: toOne(run, row.index, query), tabindex: -1 }, whole(row.index))),
    h("td", { class: "right", title: row.time ? moment(row.time) : null }, whole(row.step)),
    h("td", { class: "spare" }, who),
    h("td", {}, stateMark(row.state), row.error && h("span", { class: "soft" }, ` ${row.error}`)),
    h("td", { class: "right" }, number(row.reward)),
    h("td", { class: "spare metrics" }, metrics(row)),
    h("td", { class: "said asked spare", title: row.question || null }, h("div", {}, row.question || "–")),
    h("td", { class: "said target spare", title: row.target || null }, h("div", {}, row.target || "–")),
    h("td", { class: "said" }, h("div", {}, row.whole ? highlight(row.excerpt ?? "", query.text) : h("span", { class: "faint" }, "no conversation recorded"))),
    h("td", { class: `right spare ${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : ""}` }, number(row.advantage)),
    h("td", { class: "right", title: FINISH[row.finish] ?? null }, whole(row.tokens), row.finish === "length" && h("span", { class: "cut" }, " cut")),
    h("td", { class: "right wide" }, whole(row.turns)),
    h("td", { class: "right wide" }, `${whole(row.ticket)}, ${row.member}`),
    h("td", { class: "right wide" }, versionWords(row))), COLUMNS.map(([, label]) => label));
}

/** A few of what was measured; the rest shows when the pointer rests there, and on the rollout's page. */
function metrics(row) {
  const all = measured(row.metrics);
  return all.length ? h("span", { title: all.map((pair) => pair.join(" ")).join("\n") },
    all.slice(0, METRICS).map(([name, value]) => h("span", {}, h("span", { class: "faint" }, name), ` ${value}`)),
    all.length > METRICS ? h("span", { class: "faint" }, `and ${all.length - METRICS} more`) : null) : "–";
}

/** The words, with what was searched for marked. */
function highlight(words, wanted) {
  const at = wanted ? words.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return words;
  return [words.slice(0, at), h("mark", {}, words.slice(at, at + wanted.length)), words.slice(at + wanted.length)];
}

function notes({ kept, problems, all }) {
  return [
    !kept && all ? h("div", { class: "notice" }, "This run kept a few rollouts of each step, without tokens or fates. With ",
      h("code", {}, "record.all = true"), " a run keeps every one.") : null,
    problems.length ? h("div", { class: "notice warn" }, h("h2", {}, "Not all of it could be read"), h("ul", {}, problems.map((one) => h("li", {}, one)))) : null,
  ];
}

function nothing(run, data, query, page, first) {
  if (page > 1 && data.total) {
    return h("div", { class: "empty" }, h("h2", {}, `There is no page ${whole(page)}`), h("button", { type: "button", on: { click: first } }, "First page"));
  }
  if (data.all && isFiltered(query)) return h("div", { class: "empty" }, h("h2", {}, "No rollout matches"), h("p", {}, "Take a filter away to see more."));
  return h("div", { class: "empty" }, h("h2", {}, "No rollouts yet"),
    h("p", {}, run.status.alive ? "They appear here when the first batch is complete." : "This run kept none: it ended before its first batch, or had nothing recorded."));
}
