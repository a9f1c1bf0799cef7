// Rollouts: the list, one of them, or the league.
import * as league from "../rollout/league.js";
import * as one from "../rollout/one.js";
import * as table from "../rollout/table.js";

export const title = "Rollouts";

export function render(root, run, params) {
  const page = params.has("id") ? one : params.get("view") === "league" ? league : table;
  return page.render(root, run, params);
}
