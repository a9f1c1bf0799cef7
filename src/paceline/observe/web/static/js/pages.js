// The pages. To add one: write a module in pages/ that exports `title` and `render(root, run, params)`, and name it here.
//
// `render` fills `root`, an empty element. `run` is the open run (run.js), already followed: listen with `run.on(...)`.
// `params` is a URLSearchParams of what stands behind the ? of the page's address. It may be async, and may return a
// function that is called when the reader leaves: end listeners and streams there. What it throws is shown as a sentence.
import * as ab from "./pages/ab.js";
import * as advice from "./pages/advice.js";
import * as compare from "./pages/compare.js";
import * as config from "./pages/config.js";
import * as diff from "./pages/diff.js";
import * as metrics from "./pages/metrics.js";
import * as overview from "./pages/overview.js";
import * as replay from "./pages/replay.js";
import * as rollouts from "./pages/rollouts.js";
import * as runs from "./pages/runs.js";
import * as tickets from "./pages/tickets.js";
import * as tokens from "./pages/tokens.js";

/** Pages of one run, in the order of their tabs; #/run/NAME/<key>. The first is where a run opens. */
export const RUN_PAGES = { overview, metrics, advice, rollouts, tokens, tickets, replay, config };

/** Pages of the whole folder, which get no run; #/<key>. */
export const FOLDER_PAGES = { runs, compare, diff, ab };
