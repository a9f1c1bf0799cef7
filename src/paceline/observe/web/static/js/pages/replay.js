// A step computed once more, token by token: where its loss comes from, and what it would have been with other settings.
import { ask } from "../api.js";
import { announce, fill, h, say } from "../dom.js";
import { seconds } from "../format.js";
import { settingsForm } from "../replay/form.js";
import { outcome } from "../replay/outcome.js";
import { changed } from "../replay/words.js";
import { toRun } from "../router.js";

export const title = "Replay";

export async function render(root, run, params) {
  let data = await ask("replay", { run: run.name });
  let gone = false;
  let working = false;
  let component = "";
  const head = h("div", { class: "head" }, h("h1", {}, "Replay a step"));
  if (data.refusal || !data.steps.length) {
    fill(root, h("div", { class: "stack" }, head, h("div", { class: "empty" }, data.refusal
      ? [h("h2", {}, "This run is not replayed from a page"), h("p", {}, data.refusal), h("code", {}, `paceline replay ${data.path} STEP`)]
      : [h("h2", {}, "Nothing to replay"), h("p", {}, "No step's samples were kept. A run keeps them with record.all (the default), once a step is done.")])));
    return null;
  }
  const asked = Number(params.get("step"));
  const input = h("input", { type: "number", min: data.steps[0], max: data.steps.at(-1), required: true, "aria-describedby": "replay-weights", on: { input: () => hint() } });
  input.value = params.has("step") ? asked : data.steps.at(-1);
  const weights = h("p", { id: "replay-weights", class: "soft" });
  const go = h("button", { type: "submit", class: "strong" }, "Replay");
  const panel = h("div", { class: "replay-job", hidden: true });
  const place = h("div", { class: "stack" });
  const form = settingsForm(data.settings, (changes) => compute(changes));
  const others = h("details", { class: "section" }, h("summary", {}, "What would it have been with other settings?"),
    h("p", { class: "soft" }, "The same samples and the same weights, with another loss. Nothing of the run is changed."), form.element);
  fill(root, h("div", { class: "stack" }, head,
    h("p", { class: "soft" }, "The samples of a step go through the loss once more, on the CPU of the machine that serves this page, in a process of their own."),
    h("form", { class: "controls", on: { submit: (event) => { event.preventDefault(); compute({}); } } },
      h("label", {}, "Step", input), go, weights),
    others, panel, place));

  const step = () => Number(input.value);

  function hint() {
    const kept = data.steps.includes(step());
    const before = data.checkpoints.filter((one) => one < step()).at(-1);
    go.disabled = working || !kept;
    others.inert = working || !kept;
    say(weights, !kept ? `The samples of this step are not kept; those of ${data.steps[0]} to ${data.steps.at(-1)} are, as far as they trained.`
      : before === undefined ? (step() === 1 ? "It begins with the untrained model." : "No checkpoint from before it is kept: the untrained model stands in, and the figures will differ.")
        : before === step() - 1 ? `Its own weights are kept (checkpoint ${before}).` : `The newest checkpoint from before it is of step ${before}: the figures will differ.`);
  }

  const known = (changes) => data.results.find((one) => one.step === step() && same(one.changes, changes));

  async function compute(changes) {
    if (working) return;
    working = true;
    hint();
    remember(changes);
    fill(place);
    try {
      for (const one of Object.keys(changes).length ? [{}, changes] : [{}]) {
        if (Object.keys(changes).length && !Object.keys(one).length && known({})) continue;
        const what = Object.keys(one).length ? `step ${step()} with ${changed(one)}` : `step ${step()} as it was set`;
        if (!await through(await start(run.name, step(), one), what)) return;
      }
      await show(changes);
    } catch (error) {
      trouble(error.message);
    } finally {
      working = false;
      if (!gone) hint();
    }
  }

  /** Follow a job to its end; whether it is done. */
  async function through(job, what) {
    const said = h("span", { role: "status", "aria-live": "polite" });
    const passed = h("span", { class: "faint" });
    const stop = h("button", { type: "button", on: { click: () => cancel(run.name).catch((error) => trouble(error.message)) } }, "Cancel");
    panel.hidden = false;
    fill(panel, h("b", {}, `Replaying ${what}`), h("progress", { "aria-label": "Replaying" }), said, passed, h("span", { class: "grow" }), stop);
    const end = await untilEnded(run.name, job, (now) => {
      say(said, now.doing || "starting a process");
      say(passed, `${seconds(Math.floor(now.seconds))} of at most ${seconds(now.limit)}`);
    }, () => gone);
    if (end === null) return false;
    panel.hidden = true;
    if (end.state === "failed") trouble(end.failure);
    if (end.state === "cancelled") fill(place, h("p", { class: "notice" }, "Cancelled. Nothing was kept of it."));
    data = { ...data, ...await ask("replay", { run: run.name }) };
    return end.state === "done";
  }

  function trouble(sentence) {
    panel.hidden = true;
    if (!gone) fill(place, h("div", { class: "notice bad", role: "alert" }, h("h2", {}, "It could not be replayed"), h("p", {}, sentence)));
  }

  async function show(changes) {
    const base = known({});
    const other = Object.keys(changes).length ? known(changes) : null;
    if (!base || other === undefined) return;
    const keys = { of: base.key, against: other?.key };
    const { result } = await ask("replay/result", { run: run.name, ...keys, component });
    if (gone || !result) return;
    fill(place, outcome(run, result, keys, component, (name) => { component = name; show(changes); }));
    announce(`Step ${step()} is replayed.`, true);
  }

  function remember(changes) {
    const query = new URLSearchParams({ step: step() });
    if (Object.keys(changes).length) query.set("set", JSON.stringify(changes));
    history.replaceState(null, "", toRun(run.name, "replay", query));
  }

  hint();
  const wanted = settingsFrom(params.get("set"));
  if (Object.keys(wanted).length) {
    others.open = true;
    form.put(wanted);
  }
  if (data.job?.state === "working") {
    working = true;
    input.value = data.job.step;
    hint();
    through(data.job, `step ${data.job.step}`).then((done) => done && show({})).catch((error) => trouble(error.message))
      .finally(() => { working = false; if (!gone) hint(); });
  } else await show(wanted);
  return () => (gone = true);
}

/** The settings in the address; nothing where it was cut short. */
function settingsFrom(text) {
  try {
    const found = JSON.parse(text ?? "{}");
    return found && typeof found === "object" && !Array.isArray(found) ? found : {};
  } catch {
    return {};
  }
}

function same(one, other) {
  const keys = Object.keys(one);
  return keys.length === Object.keys(other).length && keys.every((key) => one[key] === other[key]);
}

const LOOK_MS = 500;

// The only requests that change something are POSTs in JSON from our own page.
const post = async (path, run, body) => (await ask(path, { run }, undefined, body)).job;
const start = (run, step, settings) => post("replay/start", run, { step, settings });
const cancel = (run) => post("replay/cancel", run, {});

/** Look at a job until it ends; `tell` gets its progress. Null when `left()` says that the reader has left. */
async function untilEnded(run, job, tell, left) {
  while (job?.state === "working") {
    tell(job);
    await new Promise((done) => setTimeout(done, LOOK_MS));
    if (left()) return null;
    ({ job } = await ask("replay/job", { run }));
  }
  return job;
}
