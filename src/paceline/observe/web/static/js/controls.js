// The bar above charts: axis, smoothing, zoom, and which charts to show.
import { h } from "./dom.js";

/** `filter` is called with what is typed; "/" goes there. */
export function controls(group, filter) {
  const axes = ["step", "time"].map((axis) => h("button", {
    type: "button", "aria-pressed": String(group.axis === axis), on: { click: () => group.setAxis(axis) },
  }, axis));
  group.addEventListener("axis", () => {
    axes.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === group.axis)));
    show();
  });
  const value = h("output", {}, group.smoothing ? group.smoothing.toFixed(2) : "off");
  const range = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: group.smoothing, "aria-label": "Smoothing",
    on: {
      input: () => {
        group.setSmoothing(Number(range.value));
        value.textContent = group.smoothing ? group.smoothing.toFixed(2) : "off";
      },
    },
  });
  const reset = h("button", { type: "button", hidden: true, on: { click: () => group.setZoom(null) } }, "Show all steps");
  const show = () => (reset.hidden = !group.zoom);
  group.addEventListener("look", show);
  const search = h("input", {
    type: "search", placeholder: "Find a chart  /", "aria-label": "Find a chart", "aria-keyshortcuts": "/", data: { search: "" },
    on: { input: () => filter(search.value.trim().toLowerCase()) },
  });
  return h("div", { class: "controls" },
    search,
    h("label", {}, "Along", h("span", { class: "choice", role: "group", "aria-label": "Axis" }, axes)),
    h("label", {}, "Smoothing", range, value),
    h("span", { class: "grow" }),
    reset);
}
