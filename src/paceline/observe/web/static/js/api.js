// Asking the server, and following its live updates. What it refuses comes as a sentence, and so does a server that
// does not answer.

export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** GET api/<path> with these parameters, or POST a body; lists repeat their name, null and undefined are left out. */
export async function ask(path, parameters = {}, signal = undefined, body = undefined) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  let answer, data;
  try {
    answer = await fetch(address(path, parameters), { signal, ...sent, headers: { ...type, Accept: "application/json" } });
    data = await answer.json(); // which a request that is called off while its body comes breaks off too
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (answer && !answer.ok) throw new RequestError(`The server answered ${answer.status}.`, answer.status);
    throw new RequestError("The server does not answer. Is `paceline ui` still running?", 0);
  }
  if (!answer.ok) throw new RequestError(data.error || `The server answered ${answer.status}.`, answer.status);
  return data;
}

/** Relative to the page, which a proxy may show below a path of its own. */
export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined) query.append(name, one);
    }
  }
  const text = query.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

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
