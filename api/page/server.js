/** What the page asks the server. The key goes into a header of these requests and nowhere else. */

const KEY = "mlx-troupe.key";

/** A request that was refused or failed. `status` is HTTP's, 0 when nobody answered. */
export class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The answer to a request; POST when there is a body. Throws Refused. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (storedKey()) headers.Authorization = `Bearer ${storedKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, credentials: "omit", redirect: "error" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.", 0, "unreachable");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Chunks of a streamed chat, in order. Throws Refused, also for an error event inside the stream. */
export async function* chatChunks(body, signal) {
  const response = await ask("/v1/chat/completions", { body, signal });
  let ended = false;
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, response.status, chunk.error.code);
    yield chunk;
  }
  if (!ended) throw new Refused("The connection ended before the answer did.", 0, "cut");
}

async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not ours: a proxy's page
  }
  return new Refused(String(error.message ?? `The server answered ${response.status}.`), response.status, error.code);
}
