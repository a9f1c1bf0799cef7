// Addresses: #/ (runs), #/compare?..., #/run/NAME/PAGE?...

/** What an address means: {page, run, params}. */
export function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  const params = new URLSearchParams(query ?? "");
  if (parts[0] === "run" && parts[1]) return { run: parts[1], page: parts[2] ?? "", params };
  return { run: null, page: parts[0] ?? "", params };
}

/** The address of a run's page. */
export function toRun(name, page = "overview", params = {}) {
  return `#/run/${encodeURIComponent(name)}/${page}${queryString(params)}`;
}

/** The address of a page of the folder. */
export function toPage(page, params = {}) {
  return `#/${page}${queryString(params)}`;
}

/** Put this address in place of the present one: the page stays as it is, and Back does not lead to the old one. */
export function replaceAddress(address) {
  history.replaceState(history.state, "", address);
}

function queryString(params) {
  const query = params instanceof URLSearchParams ? params : new URLSearchParams(params);
  const text = query.toString();
  return text ? `?${text}` : "";
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
