// Two runs over the same draws: how far apart they are, and whether that can be chance.
import { ask, follow } from "../api.js";
import { Chart } from "../chart/chart.js";
import { Group } from "../chart/parts.js";
import { announce, fill, h, perFrame, scrollable } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { toPage, toRun } from "../router.js";

export const title = "Which is better";

export async function render(root, _, params) {
  const a = params.get("a") ?? "";
  const b = params.get("b") ?? "";
  if (!a || !b) throw Object.assign(new Error("Name two runs: tick them in the list of runs, compare them, and ask which is better."), { status: 400 });
  const group = new Group();
  const chart = new Chart(group, { title: `Training reward: mean of ${b} less that of ${a}, so far`, unit: "reward", hint: "The band holds at all steps at once: where it leaves zero, the difference is more than chance.", broad: true });
  const heldOut = new Chart(group, { title: `Held-out reward: ${b} less ${a}`, unit: "reward", hint: "each evaluation, paired by row; the bands hold at all evaluations at once", broad: true });
  const verdict = h("div", { class: "notice", role: "status" });
  const heldOutVerdict = h("div", { class: "notice" });
  const facts = h("p", { class: "soft" });
  const body = h("tbody");
  const far = h("section", { class: "section", "aria-label": "Draws they differ most on" },
    h("h2", {}, "Draws they differ most on"),
    scrollable("Draws they differ most on", h("table", { class: "list" },
      h("caption", { class: "unseen" }, "The same draw in both runs, with the mean reward of its group in each"),
      h("thead", {}, h("tr", {}, ["Environment", "Ticket", "Step", a, b, "difference"].map((text) => h("th", { scope: "col" }, text)))),
      body)));
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, "Which is better?"),
      h("a", { href: toPage("compare", new URLSearchParams([["run", a], ["run", b]])) }, "All curves")),
    h("p", {}, h("a", { href: toRun(a) }, a), " and ", h("a", { href: toRun(b) }, b), ", paired by draw and by held-out row."),
    heldOutVerdict, verdict, facts, h("div", { class: "charts" }, heldOut.element, chart.element), far,
    h("details", { class: "section" }, h("summary", {}, "How this is known"),
      h("p", {}, "Runs of one seed draw the same rows with the same noise, so each draw is compared with itself: the mean reward of its group in both runs, whatever a filter did with it afterwards. Held-out rows are the same in every evaluation and are compared row by row."),
      h("p", {}, "A test that is repeated after every step finds differences between equals in nearly every second comparison. The band of the training reward (an asymptotic confidence sequence) holds at all times at once: equals are data apart in at most one of twenty comparisons, however often one looks. So do the bands of the evaluations: the level of each is so strict that all of them together stay below one in twenty."),
      h("p", {}, "It speaks of these two runs, on one seed. Whether one way is better in general takes several seeds."))));

  async function draw() {
    const data = await ask("ab", { a, b });
    verdict.className = data.real ? "notice good" : "notice";
    fill(verdict, data.draws ? h("b", {}, data.sentence) : "No draw was made by both.");
    heldOutVerdict.className = data.held_out.at(-1)?.is_real ? "notice good" : "notice";
    heldOutVerdict.hidden = heldOut.element.hidden = !data.held_out.length;
    fill(heldOutVerdict, h("b", {}, data.held_out_sentence ?? ""));
    if (data.real) announce(data.sentence);
    fill(facts, data.draws ? `${amount(data.draws, "draw")} made by both.` : "",
      data.real ? ` More than chance since step ${whole(data.real_step)}, after ${amount(data.real, "draw")}.` : "",
      data.different_rows ? ` ${amount(data.different_rows, "draw")} left out: the runs drew other rows there, so they do not share seed or data.` : "");
    chart.element.hidden = !data.draws;
    chart.update(differences([...data.steps], data.means ?? [], (data.radii ?? []).map((radius) => radius ?? 0)));
    const gaps = data.held_out.map(({ one, other }) => other - one);
    heldOut.update(differences(data.held_out.map(({ step }) => step), gaps, data.held_out.map(({ radius }) => radius ?? 0)));
    fill(body, data.farthest.map((one) => h("tr", {},
      h("td", {}, one.env),
      h("td", {}, h("a", { href: toRun(a, "tickets", { ticket: one.ticket }) }, whole(one.ticket))),
      h("td", {}, whole(one.step)),
      h("td", {}, h("a", { href: toRun(a, "rollouts", { id: one.rollouts[0] }) }, number(one.a))),
      h("td", {}, h("a", { href: toRun(b, "rollouts", { id: one.rollouts[1] }) }, number(one.b))),
      h("td", {}, number(one.b - one.a)))));
    far.hidden = !data.farthest.length;
  }

  /** The difference with its band, and where none would be. */
  function differences(xs, ys, radii) {
    return xs.length ? [
      { label: `${b} − ${a}`, colour: 0, xs, ys, low: ys.map((y, i) => y - radii[i]), high: ys.map((y, i) => y + radii[i]) },
      { label: "no difference", colour: 7, xs, ys: xs.map(() => 0) },
    ] : [];
  }

  await draw();
  const redraw = perFrame(() => draw().catch(() => {}));
  const stop = follow(() => ({}), { runs: ({ changed }) => changed.some(({ name }) => name === a || name === b) && redraw() });
  return () => {
    stop();
    chart.close();
    heldOut.close();
  };
}
