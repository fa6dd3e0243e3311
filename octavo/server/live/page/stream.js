// Server-sent events over fetch: unlike EventSource, it sends a key, and stops when it is told to.

/** Yield the data of each event of a response. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Post a body; yield the chunks of the streamed answer. Throws what the server says is wrong. */
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

/** Headers with the key that the user gave, if there is one. */
export function headers(extra = {}) {
  const key = document.getElementById("key").value.trim();
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

/** What a response that is no success says, with the setting that it is about. */
async function errorOf(response) {
  const error = new Error(`The server answered ${response.status}.`);
  try {
    const { message, param } = (await response.json()).error;
    Object.assign(error, { message, setting: response.status === 401 ? "key" : param });
  } catch {
    // It says nothing that can be read.
  }
  return error;
}

/**
 * Follow /live for ever: call onSnapshot for each snapshot, onLost with a reason whenever it breaks off, and
 * onReplicas with their number where there are several. The page's own ?replica= says which of them to follow.
 */
export async function follow(onSnapshot, onLost, onReplicas) {
  for (;;) {
    await visible();
    const stop = new AbortController();
    const hide = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const response = await watch(stop.signal);
      if (!response.ok) throw await errorOf(response);
      onReplicas(Number(response.headers.get("x-octavo-replicas") ?? 1));
      for await (const data of eventsOf(response)) onSnapshot(JSON.parse(data));
      onLost("the stream has ended");
    } catch (error) {
      if (!stop.signal.aborted) onLost(error.message);
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

/**
 * Ask for snapshots. A browser opens six connections to a server, and six others for what goes without cookies:
 * so that this one takes none from six questions, it goes without, unless something in between wants them.
 */
async function watch(signal) {
  const ask = (credentials) => fetch(`live${location.search}`, { headers: headers(), signal, cache: "no-store", credentials });
  const response = await ask("omit").catch(() => null);
  const isStream = response?.ok && response.headers.get("content-type")?.startsWith("text/event-stream");
  return isStream ? response : ask("same-origin");
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
  });
}
