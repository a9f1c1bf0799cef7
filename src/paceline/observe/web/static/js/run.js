// One run as the pages see it: its standing and its metrics, kept up to date.
import { ask, follow } from "./api.js";

export class Run extends EventTarget {
  /** Read a run; refused with a sentence where there is none. */
  static async open(name) {
    const run = new Run();
    run.name = name;
    const [standing, metrics] = await Promise.all([ask("run", { run: name }), ask("metrics", { run: name })]);
    run.standing = standing;
    /** Every metric as a list, all of one length, beside `step` and `time`. */
    run.columns = metrics.columns;
    /** The first and the last reward and held-out value, and the steps they are of: {reward, eval, eval_kind}. */
    run.ends = metrics.ends;
    run.mark = metrics.mark;
    /** Sizes of the files that grow; a page that shows one of them asks again when `files` comes. */
    run.files = {};
    return run;
  }

  get status() {
    return this.standing.status;
  }

  get rows() {
    return this.columns.step?.length ?? 0;
  }

  /**
   * Listen: "metrics" (lines were added), "reset" (all lines are new, after a roll-back), "standing" (state, events or
   * problems), "files". Returns a function that ends it.
   */
  on(what, listener) {
    const wrapped = (event) => listener(event.detail);
    this.addEventListener(what, wrapped);
    return () => this.removeEventListener(what, wrapped);
  }

  /** Hear what is new, until `close`. */
  follow() {
    this.stop = follow((mark) => ({ run: this.name, mark: mark || this.mark }), {
      metrics: (data) => this.#add(data),
      standing: (data) => this.#stand(data),
      status: (status) => this.#stand({ ...this.standing, status }),
      files: (sizes) => {
        this.files = sizes;
        this.#tell("files", sizes);
      },
      gone: () => this.#stand({ ...this.standing, problems: ["The run's directory was removed while you looked at it."] }),
    });
  }

  close() {
    this.stop?.();
  }

  #add({ columns, fresh, ends }) {
    this.ends = ends;
    if (fresh) this.columns = columns;
    else append(this.columns, columns);
    this.#tell(fresh ? "reset" : "metrics", columns);
  }

  #stand(standing) {
    this.standing = standing;
    this.#tell("standing", standing);
  }

  #tell(what, detail) {
    this.dispatchEvent(new CustomEvent(what, { detail }));
  }
}

/** Add lines to columns; a metric that was not there before, or is not there now, has gaps. */
export function append(columns, more) {
  const before = columns.step?.length ?? 0;
  const added = more.step?.length ?? 0;
  for (const name of new Set([...Object.keys(columns), ...Object.keys(more)])) {
    columns[name] ??= new Array(before).fill(null);
    const values = more[name] ?? new Array(added).fill(null);
    for (const value of values) columns[name].push(value);
  }
}
