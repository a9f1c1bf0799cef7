// Two runs over the same draws: how far apart they are, and whether that can be chance.
import { ask, follow } from "../api.js";
import { Chart } from "../chart/chart.js";
import { Group } from "../chart/parts.js";
import { announce, fill, h, perFrame } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { toPage, toRun } from "../router.js";

export const title = "Which is better";

export async function render(root, _, params) {
  const a = params.get("a") ?? "";
  const b = params.get("b") ?? "";
  if (!a || !b) throw Object.assign(new Error("Name two runs: tick them in the list of runs, compare them, and ask which is better."), { status: 400 });
  const group = new Group();
  const chart = new Chart(group, { title: "Mean reward of b less that of a, so far", unit: "reward", hint: "The band holds at all steps at once: where it leaves zero, the difference is real.", broad: true });
  const verdict = h("div", { class: "notice", role: "status" });
  const facts = h("p", { class: "soft" });
  const body = h("tbody");
  const far = h("section", { class: "section", "aria-label": "Draws they differ most on" },
    h("h2", {}, "Draws they differ most on"),
    h("div", { class: "scroll" }, h("table", { class: "list" },
      h("caption", { class: "unseen" }, "The same draw in both runs, with the mean reward of its group in each"),
      h("thead", {}, h("tr", {}, ["Environment", "Ticket", "Step", "a", "b", "b - a"].map((text) => h("th", { scope: "col" }, text)))),
      body)));
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, "Which is better?"),
      h("a", { href: toPage("compare", new URLSearchParams([["run", a], ["run", b]])) }, "All curves")),
    h("p", {}, "a is ", h("a", { href: toRun(a) }, a), ", b is ", h("a", { href: toRun(b) }, b), "."),
    verdict, facts, h("div", { class: "charts" }, chart.element), far,
    h("details", { class: "section" }, h("summary", {}, "How this is known"),
      h("p", {}, "Runs of one seed draw the same rows with the same noise, so each draw is compared with itself: the mean reward of its group in both runs, whatever a filter did with it afterwards."),
      h("p", {}, "A test that is repeated after every step finds differences between equals in nearly every second comparison. This band (an asymptotic confidence sequence) holds at all times at once: equals are told apart in at most one of twenty comparisons, however often one looks."),
      h("p", {}, "It speaks of these two runs: of their rewards while they trained, on one seed. Whether one way is better in general takes several seeds."))));

  async function draw() {
    const told = await ask("ab", { a, b });
    verdict.className = told.real ? "notice good" : "notice";
    fill(verdict, told.draws ? h("b", {}, told.sentence) : "No draw was made by both yet.");
    if (told.real) announce(told.sentence);
    fill(facts, told.draws ? `${amount(told.draws, "draw")} made by both.` : "",
      told.real ? ` Real since step ${whole(told.real_step)}, after ${amount(told.real, "draw")}.` : "",
      told.strangers ? ` ${amount(told.strangers, "draw")} left out: the runs drew other rows there, so they do not share seed or data.` : "");
    const xs = [...told.steps];
    const ys = told.means ?? [];
    const known = (told.radii ?? []).map((radius) => radius ?? 0);
    chart.update(xs.length ? [
      { label: "b - a", colour: 0, xs, ys, low: ys.map((y, i) => y - known[i]), high: ys.map((y, i) => y + known[i]) },
      { label: "no difference", colour: 7, xs, ys: xs.map(() => 0) },
    ] : []);
    fill(body, told.farthest.map((one) => h("tr", {},
      h("td", {}, one.env),
      h("td", {}, h("a", { href: toRun(a, "tickets", { ticket: one.ticket }) }, whole(one.ticket))),
      h("td", {}, whole(one.step)),
      h("td", {}, h("a", { href: toRun(a, "rollouts", { id: one.rollouts[0] }) }, number(one.a))),
      h("td", {}, h("a", { href: toRun(b, "rollouts", { id: one.rollouts[1] }) }, number(one.b))),
      h("td", {}, number(one.b - one.a)))));
    far.hidden = !told.farthest.length;
  }

  await draw();
  const redraw = perFrame(() => draw().catch(() => {}));
  const stop = follow(() => ({}), { runs: ({ changed }) => changed.some(({ name }) => name === a || name === b) && redraw() });
  return () => {
    stop();
    chart.close();
  };
}
