// What the charts of a page share: the axis, the zoom, the place one looks at, and how smooth curves are.
import { memory } from "../dom.js";

export class Group extends EventTarget {
  constructor() {
    super();
    /** "step", or "time": seconds since the first line. */
    this.axis = memory.get("axis", "step");
    this.smoothing = memory.get("smoothing", 0);
    /** [from, to] on the axis, or null for everything. */
    this.zoom = null;
    /** What "everything" is: the first and the last place of all charts, so that they stand under one another. */
    this.span = null;
    /** Where the reader points, on the axis, or null. */
    this.cursor = null;
  }

  setAxis(axis) {
    this.axis = axis;
    this.zoom = this.cursor = null;
    memory.set("axis", axis);
    this.#tell("axis");
  }

  setSmoothing(weight) {
    this.smoothing = weight;
    memory.set("smoothing", weight);
    this.#tell("look");
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.#tell("look");
  }

  point(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.#tell("cursor");
  }

  #tell(what) {
    this.dispatchEvent(new Event(what));
  }
}
