// The legend of the strip's colours and lines.
import { h } from "../dom.js";
import { count } from "../format.js";
import { componentsOf, figure, partColour } from "./streams.js";

const CELLS = 9;

/** The scale of a stream. */
export function scale(stream) {
  if (stream.kind === "category") {
    return h("span", { class: "token-scale" }, stream.cases.slice(0, 24).map((value) => {
      const { tint, t } = stream.paint(value);
      return h("span", { class: "token-case" }, h("i", { class: "token-cell", vars: { "--tint": tint, "--t": t } }), stream.name(value));
    }), stream.cases.length > 24 ? `and ${stream.cases.length - 24} more` : null);
  }
  const [low, high] = stream.ends;
  const cells = Array.from({ length: CELLS }, (_, place) => stream.paint(low + ((high - low) * place) / (CELLS - 1)));
  return h("span", { class: "token-scale", role: "img", "aria-label": `Scale from ${figure(low)} to ${figure(high)}` },
    figure(low), h("span", { class: "token-cells" }, cells.map(({ tint, t }) => h("i", { class: "token-cell", vars: { "--tint": tint, "--t": t } }))), figure(high));
}

/** How many tokens each loss trains, and how others are drawn. */
export function lines(told, again) {
  const sums = new Map();
  let given = 0;
  let silent = 0;
  told.ids.forEach((_, at) => {
    const by = componentsOf(told, at);
    if (by.length) sums.set(by.join(" + "), (sums.get(by.join(" + ")) ?? 0) + 1);
    else if (told.streams.loss_mask[at]) silent += 1;
    else given += 1;
  });
  const tokens = (value) => `${count(value)} token${value === 1 ? "" : "s"}`;
  return h("span", { class: "token-scale" },
    [...sums].map(([name, value]) => h("span", { class: "token-case" },
      h("i", { class: "token-chip trains sign", vars: { "--by": partColour(name.split(" + ")) } }, "a"), `${told.trains ? "trained" : "would train"} by ${name}: ${tokens(value)}`)),
    silent ? h("span", { class: "token-case" }, h("i", { class: "token-chip silent sign" }, "a"), `sampled, not trained: ${tokens(silent)}`) : null,
    given ? h("span", { class: "token-case" }, h("i", { class: "token-chip given sign" }, "a"), `given, not trained: ${tokens(given)}`) : null,
    again?.rules.size ? h("span", { class: "token-case" }, h("i", { class: "token-chip held sign" }, "a"), `held back by a bound: ${tokens(again.rules.size)}`) : null);
}
