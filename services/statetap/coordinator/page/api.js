// The API of the coordinator that served this page. Addresses are relative, so that it works below a proxy's path too.

/** A problem of RFC 9457, or one of the connection. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `HTTP ${status}`);
    this.status = status;
    this.code = body.code || "";
    this.nextStep = body.next_step || "";
  }
}

let onLogout = () => {};

/** `act` is called when an answer says that nobody is logged in (any more). */
export function whenLoggedOut(act) {
  onLogout = act;
}

export async function ask(path, { method = "GET", body } = {}) {
  let reply;
  try {
    reply = await fetch(path, {
      method,
      cache: "no-store",
      headers: { Accept: "application/json", ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Problem(0, { detail: "the coordinator does not answer", next_step: "It is asked again; look whether it runs." });
  }
  if (reply.status === 204) return null;
  const answer = await reply.json().catch(() => ({}));
  if (reply.ok) return answer;
  const problem = new Problem(reply.status, answer);
  if (reply.status === 401 && path !== "v1/session") onLogout();
  throw problem;
}

const AGAIN_MS = 3000;

/**
 * Server-sent events of jobs. The browser goes on after a cut by itself; where it gives up (an answer that is no stream) it is tried
 * again here. Returns a function that ends it.
 */
export function watch(path, onJob, onLine) {
  let source;
  let timer;
  let ended = false;
  const open = () => {
    source = new EventSource(path);
    source.onopen = () => onLine(true);
    source.addEventListener("job", (event) => onJob(JSON.parse(event.data)));
    source.onerror = () => {
      onLine(false);
      if (source.readyState !== EventSource.CLOSED || ended) return;
      // Which status it was, EventSource does not say: this finds out, and leads to the login.
      ask("v1/engines").catch(() => {});
      timer = setTimeout(open, AGAIN_MS);
    };
  };
  open();
  return () => {
    ended = true;
    clearTimeout(timer);
    source.close();
  };
}

/** Calls `act` now and then each `ms` after it ended, until the function that is returned is called. Errors go to `fail`. */
export function poll(ms, act, fail) {
  let timer;
  let ended = false;
  const once = async () => {
    try {
      await act();
    } catch (error) {
      if (!ended) fail(error);
    }
    if (!ended) timer = setTimeout(once, ms);
  };
  once();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
