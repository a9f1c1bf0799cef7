// Numbers and tokens as this page writes them.

/** +0.00123, −3.1e-5: a share keeps its sign, and three digits. */
export function share(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e4 ? String(Number(size.toPrecision(4))) : size.toExponential(2);
  return `${value > 0 ? "+" : "−"}${text}`;
}

/** A figure without a sign of its own. */
export function figure(value) {
  return share(value).replace(/^\+/, "");
}

/** A token's text with its white space to be seen; its number where there is no text. */
export function visible(text, id) {
  if (text === null || text === undefined) return String(id);
  if (text === "") return "∅";
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

/** trainer.loss.type = ppo, trainer.loss.clip_low = 0.1 */
export function changed(changes) {
  return Object.entries(changes).map(([key, value]) => `${key.replace(/^trainer\./, "")} = ${value ?? "off"}`).join(", ");
}
