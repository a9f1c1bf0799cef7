// A token's text with nothing hidden: line breaks, tabs, odd spaces and characters without a shape are written out.

const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍" };
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]|[^\S ]/gu;
const LONGEST = 200;

/** What a chip shows of a text. */
export function visible(text) {
  const shown = text.slice(0, LONGEST).replace(HIDDEN, (letter) => SIGNS[letter] ?? `⟨U+${code(letter)}⟩`);
  if (!shown) return "∅";
  if (/^ +$/.test(shown)) return "␣".repeat(shown.length);
  const begun = /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
  return text.length > LONGEST ? `${begun}…` : begun;
}

/** The same for one token of a sequence: {shown, kind}, where a kind says that the text itself is not there. */
export function piece(told, at) {
  const text = told.texts?.[at];
  if (text !== null && text !== undefined) return { shown: visible(text), kind: "" };
  const part = told.parts[at];
  return part ? { shown: part.bytes, kind: "bytes" } : { shown: `#${told.ids[at]}`, kind: "number" };
}

/** Whether the line ends with this token. */
export function breaks(told, at) {
  return told.texts?.[at]?.includes("\n") ?? false;
}

function code(letter) {
  return letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}
