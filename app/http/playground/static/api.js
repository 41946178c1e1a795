// Requests to the service. Owns: addresses, the key (in memory only) and what an error says. Touches no element.
import { say } from "./words.js";

// The page may lie below a prefix that a proxy has set; this file lies in `playground/` of it.
export const base = new URL("..", import.meta.url);

let key = "";
export const setKey = (value) => { key = value.trim(); };
export const hasKey = () => key !== "";

export class ServiceError extends Error {
  constructor(status, code, message, requestId = "", retryAfter = "") {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfter });
  }
}

// A response that is good. Throws ServiceError for every other, and for a service that cannot be reached.
export async function send(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(new URL(path, base), { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(0, "UNREACHABLE", say("no_answer"));
  }
  if (response.ok) return response;
  let said = {};
  try { said = await response.json(); } catch { /* A proxy in between may say anything. */ }
  throw new ServiceError(response.status, said.code || `HTTP ${response.status}`, said.error || response.statusText,
    said.request_id || response.headers.get("x-request-id") || "", response.headers.get("retry-after") || "");
}

export const getJson = async (path) => (await send(path)).json();

// Milliseconds of each stage, from "decode;dur=1.2, queue;dur=0.3".
export function serverTiming(response) {
  const stages = {};
  for (const part of (response.headers.get("server-timing") || "").split(",")) {
    const found = /^\s*([\w-]+).*?dur=([\d.]+)/.exec(part);
    if (found) stages[found[1]] = Number(found[2]);
  }
  return stages;
}

export const predictPath = (model, query) => `v1/models/${encodeURIComponent(model)}:predict?${new URLSearchParams(query)}`;

// The answer to one image: {prediction, answer, timing, totalMs}.
export async function predict(model, image, query, options = {}) {
  const started = performance.now();
  const response = await send(predictPath(model, query), {
    method: "POST", body: image, signal: options.signal,
    headers: { "Content-Type": image.type || "application/octet-stream", ...options.headers },
  });
  const answer = await response.json();
  return { answer, prediction: answer.predictions[0], timing: serverTiming(response), totalMs: performance.now() - started };
}

// Server-sent events, read with fetch: EventSource can send no key. Resolves when the stream ends.
export async function events(path, onEvent, signal) {
  const response = await send(path, { headers: { Accept: "text/event-stream" }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) onEvent(JSON.parse(data));
    }
  }
}
