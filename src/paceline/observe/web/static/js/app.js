// The shell: which page is shown, the tabs of a run, the theme and the keys that work everywhere.
import { announce, fill, h } from "./dom.js";
import { FOLDER_PAGES, RUN_PAGES } from "./pages.js";
import { parse, toRun } from "./router.js";
import { Run } from "./run.js";
import { statePill } from "./status.js";

const main = document.getElementById("main");
const trail = document.getElementById("trail");
const tabs = document.getElementById("tabs");

let run = null;
let leave = null;
let forget = null;
let turn = 0;
const places = new Map(); // How far down each entry of the history was left.
let entry = entryKey();

/** Name the present entry of the history; one that is come back to has its name already. */
function entryKey() {
  const key = history.state?.key ?? String(Math.random());
  history.replaceState({ key }, "");
  return key;
}

/** Show what the address says, scrolled to `top`. A page that was asked for later wins, however long an earlier one takes. */
async function show(top = 0) {
  const mine = (turn += 1);
  const target = parse(location.hash);
  leave?.();
  leave = null;
  if (run && run.name !== target.run) {
    run.close();
    run = null;
  }
  const root = h("div", { class: "page" });
  const reading = h("p", { class: "faint reading" }, "Reading…");
  const slow = setTimeout(() => { // in the page's own place, so that its first content takes it away and nothing moves later
    if (mine === turn && !root.hasChildNodes()) (root.isConnected ? root : main).prepend(reading);
  }, 300);
  try {
    if (target.run !== null && !run) {
      const opened = await Run.open(target.run);
      if (mine !== turn) return;
      run = opened;
      run.follow();
    }
    const page = pageOf(target);
    head(target, page);
    fill(main, root);
    const left = await page.module.render(root, run, target.params);
    if (mine === turn) {
      leave = left ?? null;
      scrollTo(0, top);
    } else left?.();
  } catch (error) {
    if (mine !== turn) return;
    head(target, null);
    fill(main, failure(error));
    if (error.status === undefined) console.error(error);
  } finally {
    clearTimeout(slow);
    reading.remove();
  }
}

function pageOf({ run: name, page }) {
  const pages = name === null ? FOLDER_PAGES : RUN_PAGES;
  const key = page || Object.keys(pages)[0];
  if (!Object.hasOwn(pages, key)) throw Object.assign(new Error(`There is no page "${key}".`), { status: 404 });
  return { key, module: pages[key] };
}

/** The way here, the tabs, and the window's title. */
function head(target, page) {
  forget?.();
  forget = null;
  const slash = () => h("span", { class: "slash", "aria-hidden": "true" }, "/");
  if (target.run !== null) {
    const pill = h("span", {});
    fill(trail, slash(), h("a", { href: "#/" }, "runs"), slash(), h("span", { class: "here" }, target.run), pill);
    if (run) {
      let advisories = 0;
      const draw = () => fill(pill, statePill(run.status.state, run.standing?.health, advisories));
      RUN_PAGES.advice.badge(run).then((count) => { advisories = count; if (run) draw(); }, () => {});
      draw();
      forget = run.on("standing", draw);
    }
  } else {
    fill(trail, slash(), page?.key === "runs" || !page ? h("span", { class: "here" }, "runs") : [
      h("a", { href: "#/" }, "runs"), slash(), h("span", { class: "here" }, page.module.title.toLowerCase())]);
  }
  tabs.hidden = target.run === null || !run;
  fill(tabs, Object.entries(RUN_PAGES).map(([key, module]) =>
    h("a", { href: toRun(target.run ?? "", key), "aria-current": key === page?.key ? "page" : null }, module.title)));
  const here = tabs.querySelector("[aria-current=page]"); // not scrollIntoView: the Tab key would go on from there
  if (here) tabs.scrollLeft += here.getBoundingClientRect().right - tabs.getBoundingClientRect().right + here.offsetWidth;
  badges();
  document.title = [page?.module.title, target.run, "Paceline"].filter(Boolean).join(" · ");
  announce(document.title, true);
}

/** What a page's tab counts, once it is known; a count is a convenience, and never worth an error. */
function badges() {
  Object.values(RUN_PAGES).forEach(({ badge }, place) => {
    const tab = tabs.children[place];
    if (run) badge?.(run).then((count) => count && tab.append(h("span", { class: "badge" }, String(count))), () => {});
  });
}

function failure(error) {
  return h("div", { class: "notice bad", role: "alert" },
    h("h2", {}, "This page cannot be shown"),
    h("p", {}, error.message),
    h("p", {}, h("a", { href: "#/" }, "All runs")));
}

/** `/` goes to the search field of the page, wherever the focus is, unless one is writing. */
function keys(event) {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches?.("input, textarea, select, [contenteditable]")) return;
  const field = main.querySelector("[data-search]");
  if (!field) return;
  event.preventDefault();
  field.focus();
  field.select();
}

function theme() {
  const button = document.getElementById("theme");
  const name = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  const draw = () => {
    button.textContent = name() === "light" ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", `Use the ${name()} theme`);
  };
  button.addEventListener("click", () => globalThis.chooseTheme(name()));
  addEventListener("theme", draw);
  draw();
}

document.getElementById("skip").addEventListener("click", () => main.focus());
addEventListener("keydown", keys);
history.scrollRestoration = "manual"; // the browser would restore it before the page is drawn
addEventListener("hashchange", () => {
  places.set(entry, scrollY);
  entry = entryKey();
  scrollTo(0, 0);
  show(places.get(entry));
});
theme();
show();
