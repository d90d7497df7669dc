/** The live view: asks for the server's status every second while somebody looks. */

import { ask } from "./server.js";

const EVERY_MS = 1000;
const POINTS = 60;

const byId = (id) => document.getElementById(id);
const show = (id, text) => {
  if (byId(id).textContent !== text) byId(id).textContent = text;
};
const count = (number) => Number(number ?? 0).toLocaleString("en");

export function bytes(number) {
  let rest = Number(number ?? 0);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (rest < 1000) return `${rest.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    rest /= 1000;
  }
  return `${rest.toFixed(1)} TB`;
}

/** Tokens a second between polls. */
class Speed {
  constructor() {
    this.last = null;
    this.points = [];
  }

  add(tokens, now) {
    if (this.last && now > this.last.now && tokens >= this.last.tokens) {
      this.points.push((1000 * (tokens - this.last.tokens)) / (now - this.last.now));
      this.points = this.points.slice(-POINTS);
    }
    this.last = { tokens, now };
    return this.points.at(-1) ?? 0;
  }

  line() {
    const most = Math.max(1, ...this.points);
    return this.points.map((value, place) => `${place},${(19 - (18 * value) / most).toFixed(2)}`).join(" ");
  }
}

export class Live {
  /** @param {(problem: Error | null) => void} heard called after each answer, with what went wrong. */
  constructor(heard) {
    this.heard = heard;
    this.speed = new Speed();
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** Ask now, and every second from then on while the page is visible. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    const round = (this.round = (this.round ?? 0) + 1);
    let problem = null;
    try {
      const status = await (await ask("/v1/troupe/status")).json();
      if (round === this.round) this.#draw(status);
    } catch (error) {
      problem = error;
    }
    if (round !== this.round) return;
    this.heard(problem);
    this.timer = setTimeout(() => this.poll(), problem ? 3 * EVERY_MS : EVERY_MS);
  }

  #draw({ model, readiness, statistics, memory }) {
    show("model", model ?? "");
    const state = byId("state");
    show("state", readiness.ready ? "ready" : [readiness.reason, readiness.detail].filter(Boolean).join(": "));
    state.classList.toggle("good", readiness.ready);
    state.classList.toggle("bad", !readiness.ready);
    show("waiting", count(statistics.waiting));
    show("prefilling", count(statistics.prefilling));
    show("running", count(statistics.running));
    show("holds", this.#holds(statistics.holds ?? {}));
    show("speed", this.speed.add(statistics.completion_tokens, performance.now()).toFixed(1));
    byId("speed-line").firstElementChild.setAttribute("points", this.speed.line());
    this.#memory(statistics, memory);
    this.#cache(statistics.cache);
    show("prompt-tokens", count(statistics.prompt_tokens));
    show("answer-tokens", count(statistics.completion_tokens));
    show("finished", count(Object.values(statistics.finished).reduce((sum, part) => sum + part, 0)));
  }

  /** Reasons whose counts grew since the last poll. */
  #holds(holds) {
    const before = this.held ?? holds;
    this.held = holds;
    const now = Object.keys(holds).filter((reason) => holds[reason] > (before[reason] ?? 0));
    return now.join(", ") || "none";
  }

  #memory(statistics, memory) {
    const used = memory?.active_bytes ?? statistics.memory_active_bytes;
    show("memory-used", bytes(used));
    show("memory-peak", bytes(memory?.peak_bytes ?? statistics.memory_peak_bytes));
    show("memory-limit", memory ? bytes(memory.abort_bytes) : "not known");
    byId("memory-meter").value = memory ? Math.min(1, used / memory.abort_bytes) : 0;
  }

  #cache(cache) {
    const share = cache.queried_tokens ? cache.hit_tokens / cache.queried_tokens : 0;
    byId("cache-meter").value = share;
    show("cache-hits", `${(100 * share).toFixed(0)} % of ${count(cache.queried_tokens)}`);
    show("cache-ram", `${bytes(cache.ram_bytes)}, ${count(cache.ram_pages)} pages`);
    show("cache-disk", `${bytes(cache.disk_bytes)}, ${count(cache.disk_pages)} pages`);
  }
}
