// Other settings of the loss: a field for each that may be tried, with what the run had.
import { fill, h, prose } from "../dom.js";

/** A form over the settings; `changes()` is what differs from the run, `put(changes)` fills it in. */
export function settingsForm(settings, submit) {
  const type = settings[0];
  const fields = new Map(settings.map((setting) => [`${setting.of} ${setting.key}`, field(setting, type.value, () => draw())]));
  const body = h("div", { class: "fields" });
  const note = h("p", { class: "soft" });
  const button = h("button", { type: "submit" }, "Replay with these settings");
  const reset = h("button", { type: "button", class: "quiet", on: { click: () => put({}) } }, "As the run had them");
  const element = h("form", { class: "loss-settings", on: { submit: (event) => { event.preventDefault(); submit(changes()); } } },
    body, h("div", { class: "row" }, button, reset, note));
  const loss = () => fields.get(` ${type.key}`).read();
  const shown = () => settings.filter((setting) => !setting.of || setting.of === loss());

  function changes() {
    return Object.fromEntries(shown().map((setting) => [setting, fields.get(`${setting.of} ${setting.key}`).read()])
      .filter(([setting, value]) => value !== (setting.value ?? null))
      .map(([setting, value]) => [setting.key, value]));
  }

  function put(wanted) {
    for (const setting of settings) {
      const given = Object.hasOwn(wanted, setting.key) && (!setting.of || setting.of === (wanted[type.key] ?? type.value));
      fields.get(`${setting.of} ${setting.key}`).write(given ? wanted[setting.key] : setting.value);
    }
    draw();
  }

  function draw() {
    const now = changes();
    const wrong = shown().some((setting) => Number.isNaN(fields.get(`${setting.of} ${setting.key}`).read()));
    fill(body, shown().map((setting) => {
      const { element: line } = fields.get(`${setting.of} ${setting.key}`);
      line.classList.toggle("changed", Object.hasOwn(now, setting.key));
      return line;
    }));
    const count = Object.keys(now).length;
    button.disabled = !count || wrong;
    reset.hidden = !count;
    note.textContent = wrong ? "A number is not finished." : count ? "" : "Change something first.";
  }

  put({});
  return { element, changes, put };
}

function field(setting, current, changed) {
  const { control, read, write } = { choice, flag }[setting.kind]?.(setting) ?? number(setting);
  const name = setting.key.replace(/^trainer\./, "");
  const had = setting.value === null || setting.value === undefined ? "off" : String(setting.value);
  control.addEventListener("input", () => {
    const at = document.activeElement;
    changed();
    at?.focus();
  });
  const element = h("label", { class: "field" }, h("span", { class: "mono name" }, name), control,
    h("span", { class: "help" }, setting.help ? [...prose(setting.help), " "] : null, h("span", { class: "faint" }, `${setting.of && setting.of !== current ? "by default" : "in this run"}: ${had}`)));
  return { element, read, write };
}

function choice(setting) {
  const control = h("select", {}, setting.options.map((option) => h("option", { value: option }, option)));
  return { control, read: () => control.value, write: (value) => (control.value = value ?? setting.options[0]) };
}

function flag() {
  const control = h("input", { type: "checkbox" });
  return { control, read: () => control.checked, write: (value) => (control.checked = Boolean(value)) };
}

/** Text, since browsers differ in what they take for a number; empty is "off" where the setting may be. */
function number(setting) {
  const control = h("input", { type: "text", inputmode: "decimal", size: 10, placeholder: setting.optional ? "off" : "", autocomplete: "off" });
  const read = () => {
    const text = control.value.trim();
    if (!text) return setting.optional ? null : NaN;
    const value = Number(text);
    return Number.isFinite(value) && (setting.kind !== "integer" || Number.isInteger(value)) ? value : NaN;
  };
  return { control, read, write: (value) => (control.value = value ?? "") };
}
