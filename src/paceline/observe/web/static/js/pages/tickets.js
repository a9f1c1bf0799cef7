// Tickets: every row that was drawn, what became of it, and the life of one.
import { ask } from "../api.js";
import { fill, h, patchRows, prose } from "../dom.js";
import { clock, count, moment, number, seconds, whole } from "../format.js";
import { toRun } from "../router.js";
import { cards, named, walkable } from "../rows.js";

export const title = "Tickets";
const PAGE = 50;
const COLUMNS = ["Ticket", "State", "Environment", "Row", "Epoch", "Step", "Attempts", "Why it was dropped"];

export async function render(root, run, params) {
  return params.get("ticket") ? one(root, run, params.get("ticket")) : many(root, run, params);
}

async function one(root, run, number) {
  const place = h("div", { class: "stack" });
  const state = h("span", {});
  let size = run.files["tickets.jsonl"];
  const draw = async () => {
    const data = await ask("ticket", { run: run.name, ticket: number });
    fill(state, pill(data.state));
    fill(place, life(run, data));
  };
  await draw();
  const back = /^\d+$/.test(number) && Number(number) > 0 ? h("a", { href: toRun(run.name, "tickets", { ticket: Number(number) - 1 }) }, "← the one before") : null;
  fill(root, h("div", { class: "stack tickets" },
    h("div", { class: "head" }, h("h1", {}, `Ticket ${number}`), state, h("span", { class: "grow" }), back,
      h("a", { href: toRun(run.name, "tickets", { ticket: Number(number) + 1 }) }, "the next one →"), h("a", { href: toRun(run.name, "tickets") }, "All tickets")),
    place));
  return run.on("files", (files) => {
    const now = files["tickets.jsonl"];
    if (now !== size) draw().catch(() => {});
    size = now;
  });
}

async function many(root, run, params) {
  const state = Object.fromEntries(["env", "state", "reason"].map((name) => [name, params.get(name) || null]));
  const offset = Math.max(0, Number.parseInt(params.get("offset") ?? "0", 10) || 0);
  const go = (changes) => {
    const next = Object.entries({ ...state, offset: 0, ...changes }).filter(([, value]) => value);
    location.hash = toRun(run.name, "tickets", Object.fromEntries(next));
  };
  const body = h("tbody");
  const remember = walkable(body, { open: (row) => (location.hash = toRun(run.name, "tickets", { ticket: row.dataset.key })) });
  const filters = h("div", { class: "controls" });
  const sum = h("span", { class: "soft", role: "status" });
  const pager = h("div", { class: "row" });
  const nothing = h("div");
  const problems = h("div");
  const table = h("div", { class: "scroll" }, h("table", { class: "list cards" },
    h("caption", { class: "unseen" }, "Tickets, the newest first"),
    h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))), body));

  let drawn = "";
  async function draw() {
    const data = await ask("tickets", { run: run.name, ...state, offset, limit: PAGE });
    sum.textContent = `${whole(data.total)} ${Object.values(state).some(Boolean) ? "match" : "drawn"}`;
    const kinds = JSON.stringify([data.states, data.reasons, data.envs]);
    if (kinds !== drawn) fill(filters, ...choices(data, state, go), finder(run));
    drawn = kinds;
    const restore = remember();
    patchRows(body, data.rows.map((ticket) => row(run, ticket)));
    restore();
    table.hidden = !data.rows.length;
    fill(nothing, data.rows.length ? null : empty(state, go));
    fill(pager, pages(data.total, offset, go));
    fill(problems, data.problems.length ? h("div", { class: "notice warn" }, h("ul", {}, data.problems.map((problem) => h("li", {}, problem)))) : null);
  }

  fill(root, h("div", { class: "stack tickets" },
    h("div", { class: "head" }, h("h1", {}, "Tickets"), sum),
    h("p", { class: "soft" }, "A ticket is one draw of a row of the data. Each is played as a group, and is trained once or dropped for a reason."),
    problems, filters, table, nothing, pager));
  let size = run.files["tickets.jsonl"];
  await draw();
  if (size !== run.files["tickets.jsonl"]) {
    size = run.files["tickets.jsonl"]; // it grew while it was read
    draw().catch(() => {});
  }
  return run.on("files", (files) => {
    const now = files["tickets.jsonl"];
    if (now !== size && !filters.contains(document.activeElement)) draw().catch(() => {});
    size = now;
  });
}

function row(run, ticket) {
  const { number, env, row: at, epoch, step, attempts, reason, why, replays } = ticket;
  return named(h("tr", { data: { key: number }, tabindex: -1 },
    h("td", {}, h("a", { href: toRun(run.name, "tickets", { ticket: number }), tabindex: -1 }, number)),
    h("td", {}, pill(ticket.state), replays === undefined ? null : h("span", { class: "soft" }, ` replays ${replays}`)),
    h("td", {}, env), h("td", {}, whole(at)), h("td", {}, whole(epoch)),
    h("td", {}, step === undefined ? "–" : whole(step)), h("td", {}, attempts || "–"),
    h("td", { class: "soft", title: reason ?? null }, why || "–")), COLUMNS);
}

function choices(data, state, go) {
  const select = (name, label, options) => h("label", {}, label, h("select", { on: { change: (event) => go({ [name]: event.target.value }) } },
    h("option", { value: "" }, "all"),
    options.map(([value, words]) => h("option", { value, selected: state[name] === value }, words))));
  const counted = (table) => Object.entries(table).map(([name, value]) => [name, `${name} (${count(value)})`]);
  const known = state.reason && !(state.reason in data.reasons) ? { [state.reason]: 0 } : {};
  return [
    select("state", "State", counted(data.states)),
    select("reason", "Dropped because", counted({ ...data.reasons, ...known })),
    data.envs.length > 1 || state.env ? select("env", "Environment", data.envs.map((name) => [name, name])) : null,
    h("span", { class: "grow" })];
}

function finder(run) {
  const field = h("input", { type: "text", inputmode: "numeric", size: 10, placeholder: "Ticket  /", "aria-label": "Go to ticket", "aria-keyshortcuts": "/", data: { search: "" } });
  return h("form", { on: { submit: (event) => {
    event.preventDefault();
    if (/^\d+$/.test(field.value.trim())) location.hash = toRun(run.name, "tickets", { ticket: field.value.trim() });
  } } }, field);
}

function pages(total, offset, go) {
  if (total <= PAGE && !offset) return null;
  return [
    h("button", { type: "button", disabled: offset === 0, on: { click: () => go({ offset: Math.max(0, offset - PAGE) }) } }, "Newer"),
    h("button", { type: "button", disabled: offset + PAGE >= total, on: { click: () => go({ offset: offset + PAGE }) } }, "Older"),
    h("span", { class: "soft" }, total ? `${whole(Math.min(total, offset + 1))} to ${whole(Math.min(total, offset + PAGE))} of ${whole(total)}` : "")];
}

function empty(state, go) {
  const any = Object.values(state).some(Boolean);
  return h("div", { class: "empty" }, h("h2", {}, any ? "No ticket matches" : "No ticket"),
    any ? h("button", { type: "button", on: { click: () => go({ env: null, state: null, reason: null }) } }, "Show all tickets")
      : h("p", {}, "Tickets are written down with the first batch that trains. What was played before is in the list of rollouts."));
}

function pill(state) {
  const kind = { trained: "finished", dropped: "interrupted", "in flight": "running", buffered: "starting" }[state] ?? "";
  return state ? h("span", { class: `pill ${kind}` }, state) : null;
}

function life(run, data) {
  return [
    h("ol", { class: "ticket-life", "aria-label": `The life of ticket ${data.number}` }, data.stages.map((stage) => stageOf(run, stage))),
    data.rollouts.length ? group(run, data) : null,
    data.kept ? null : h("p", { class: "faint" }, "This run keeps a few readable rollouts alone (record.all = false)."),
    journal(data.journal),
  ];
}

function stageOf(run, stage) {
  const link = (page, params, words) => h("a", { href: toRun(run.name, page, params) }, words);
  const time = stage.time ? moment(stage.time) : stage.after ? `after ${moment(stage.after)}` : stage.by ? `before ${moment(stage.by)}` : "";
  return h("li", { class: `stage ${stage.name}` },
    h("div", { class: "what" }, h("b", {}, stage.name), time ? h("span", { class: "faint" }, time) : null),
    h("p", {}, prose(stage.text)),
    stage.phases?.length ? h("p", { class: "soft" }, stage.phases.map(({ name, start, end }, place) =>
      `${place ? ", " : ""}${name} ${clock(start)} for ${seconds(end - start)}`)) : null,
    h("p", { class: "row" },
      stage.ticket !== undefined ? link("tickets", { ticket: stage.ticket }, `Ticket ${stage.ticket}`) : null,
      stage.name === "trained" ? [link("replay", { step: stage.step }, `Replay step ${stage.step}`),
        link("rollouts", { step_from: stage.step, step_to: stage.step }, `All rollouts of step ${stage.step}`)] : null));
}

function group(run, data) {
  const rows = data.rollouts.map((row) => h("tr", {},
    h("th", { scope: "row" }, row.member),
    h("td", {}, row.actor),
    h("td", { class: "right" }, number(row.reward)),
    h("td", { class: "right" }, number(row.advantage)),
    h("td", { class: "right" }, whole(row.tokens)),
    h("td", {}, row.version_max < 0 ? "–" : row.version_min === row.version_max ? row.version_min : `${row.version_min} to ${row.version_max}`),
    h("td", {}, row.finish || "–"),
    h("td", { class: row.error ? "bad" : null }, row.error ? `failed: ${row.error}` : row.state),
    h("td", {}, h("a", { href: toRun(run.name, "rollouts", { id: row.index }), "aria-label": `Conversation of member ${row.member}` }, "conversation"), " · ",
      h("a", { href: toRun(run.name, "tokens", { id: row.index }), "aria-label": `Tokens of member ${row.member}` }, "tokens"))));
  const left = data.rollouts_total - data.rollouts.length;
  return h("section", { class: "section" }, h("h2", {}, "Its group", left ? h("span", { class: "faint" }, `${left} more are not listed`) : null),
    h("div", { class: "scroll" }, cards(h("table", { class: "list" },
      h("caption", { class: "unseen" }, "Rollouts of this ticket"),
      h("thead", {}, h("tr", {}, ["Member", "Actor", "Reward", "Advantage", "Tokens", "Version", "Finish", "State", "Look"].map((name, place) =>
        h("th", { scope: "col", class: place > 1 && place < 5 ? "right" : null }, name)))),
      h("tbody", {}, rows)))));
}

/** The lines as they stand in the file. */
function journal(entries) {
  return h("details", { class: "section" }, h("summary", {}, "Journal", h("span", { class: "faint" }, `${entries.length} lines of tickets.jsonl`)),
    h("pre", { class: "raw", tabindex: 0 }, entries.map((entry) => JSON.stringify(entry)).join("\n")));
}
