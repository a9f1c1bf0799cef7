// The values that a replay of the step computed for this sample, if there is one; no file keeps them.
import { ask } from "../api.js";

/**
 * The ratio, the trainer's log probability, the entropy and the share of the loss of each token, as streams; the rules
 * that held tokens back, by place; and whether the weights were those of the step. Null where there is no replay of it.
 */
export async function replayed(run, told) {
  if (!told.trains || told.place === null || told.place === undefined) return null;
  const { results } = await ask("replay", { run: run.name });
  const mine = results.findLast(({ step, changes }) => step === told.rollout.step && !Object.keys(changes).length);
  if (!mine) return null;
  const [{ sample }, { result }] = await Promise.all([
    ask("replay/sample", { run: run.name, of: mine.key, sample: told.place }), ask("replay/result", { run: run.name, of: mine.key })]);
  // A run that went back has other samples under the same step.
  if (!sample?.trained || !result || sample.ids.some((id, at) => id !== told.ids[at])) return null;
  const { places, share, held_back: held, skipped } = sample.trained;
  const column = (values) => {
    const spread = new Array(told.ids.length).fill(null);
    places.forEach((place, at) => (spread[place] = values[at]));
    return spread;
  };
  const rules = new Map();
  for (const { token, component, rule } of held) rules.set(places[token], [...(rules.get(places[token]) ?? []), `${component}: ${rule}`]);
  const total = places.map((_, at) => Object.values(share).reduce((sum, values) => sum + (values[at] ?? 0), 0));
  return {
    ratio: column(sample.trained.ratio), entropy: column(sample.trained.entropy), logprob: column(sample.trained.logprob), share: column(total),
    rules, skipped, exact: result.about.weights.exact, from: result.about.weights.from,
  };
}
