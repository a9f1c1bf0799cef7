// Trees of Markdown, code and boards as elements. A tree is a text or [tag, attributes, children]; it comes from what a model
// said, so tags and attributes are those of these lists, and a link leads to http(s) or mail and to nothing else.
import { h, outline } from "../dom.js";

const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "pre", "code", "em", "strong", "s",
  "a", "span", "table", "thead", "tbody", "tr", "th", "td"]);
const CLASS = /^(grid|formula|formula block|boxed|code-[a-z]+)$/;
const PATH = /^[MLQCZ\d -]*$/;
const LINK = /^(https?:\/\/|mailto:)/i;

export function drawn(trees) {
  return trees.map((tree) => {
    if (typeof tree === "string") return tree;
    const [tag, given, children] = tree;
    if (tag === "formula" && PATH.test(given.path)) return outline(given, children.join(""));
    if (!TAGS.has(tag)) return drawn(children);
    const attributes = {};
    if (CLASS.test(given.class ?? "")) attributes.class = given.class;
    if (Number.isInteger(given.start)) attributes.start = given.start;
    if (tag === "a" && LINK.test(given.href ?? "")) Object.assign(attributes, { href: given.href, rel: "noopener noreferrer nofollow", target: "_blank" });
    // Headings of a message are none of the page.
    return /^h[1-6]$/.test(tag) ? h("p", { class: "heading" }, drawn(children)) : h(tag, attributes, drawn(children));
  });
}
