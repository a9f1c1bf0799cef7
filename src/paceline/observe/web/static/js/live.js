// Live updates: one stream a page, let go while the page is hidden (a browser allows six to a server).
import { address } from "./api.js";

/**
 * Follow a stream of server-sent events. `parameters` is asked anew at each start, so that a page goes on from where it
 * is. `listeners` maps an event's name to a function of what it says. Returns a function that ends it.
 */
export function follow(parameters, listeners) {
  let source = null;
  let mark = "";
  const state = document.getElementById("link");
  const lost = () => {
    state.textContent = "connection lost, trying again";
    state.hidden = false;
  };
  const start = () => {
    source = new EventSource(address("live", parameters(mark)));
    source.addEventListener("open", () => (state.hidden = true));
    source.addEventListener("error", lost);
    for (const [name, listener] of Object.entries(listeners)) {
      source.addEventListener(name, (event) => {
        if (event.lastEventId) mark = event.lastEventId;
        listener(JSON.parse(event.data));
      });
    }
  };
  const stop = () => {
    source?.close();
    source = null;
  };
  const seen = () => {
    if (document.hidden) stop();
    else if (!source) start();
  };
  document.addEventListener("visibilitychange", seen);
  if (!document.hidden) start();
  return () => {
    document.removeEventListener("visibilitychange", seen);
    stop();
    state.hidden = true;
  };
}
