/** One conversation, in memory only: what was said, and the answer that is on its way. */

import { Markdown } from "./markdown.js";
import { chatChunks } from "./server.js";

/** How much of one answer is shown; the rest is counted. */
const MOST_CHARACTERS = 2_000_000;

export class Chat {
  /** @param {HTMLElement} list where messages appear. */
  constructor(list) {
    this.list = list;
    this.turns = [];
    this.abort = null;
    this.atEnd = true; // somebody who scrolled up to read is left there
    list.addEventListener("scroll", () => {
      this.atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
    });
  }

  get busy() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.list.querySelectorAll("article").forEach((article) => article.remove());
  }

  /**
   * Ask, and show the answer as it comes. Returns what went wrong, null if nothing did; what had come stays.
   * @param {object} options fields of the request: `system`, `temperature`, `max_tokens`.
   */
  async send(text, { system, ...fields }) {
    this.turns.push({ role: "user", content: text });
    this.#article("user").append(text);
    this.atEnd = true;
    const answer = new Answer(this.#article("assistant"), () => this.#follow());
    const turns = this.turns;
    const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
    const abort = new AbortController();
    this.abort = abort;
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...fields };
    let failure = null;
    try {
      for await (const chunk of chatChunks(body, abort.signal)) answer.take(chunk);
    } catch (error) {
      if (!abort.signal.aborted) failure = error;
    } finally {
      answer.end(abort.signal.aborted, failure);
      if (this.abort === abort) this.abort = null;
    }
    // The next template wants turns in pairs, so a question that got no answer is asked anew.
    if (answer.text) turns.push({ role: "assistant", content: answer.text });
    else turns.pop();
    return failure;
  }

  #article(kind) {
    const article = document.createElement("article");
    article.className = kind;
    article.setAttribute("aria-label", kind === "user" ? "You" : "Model");
    this.list.append(article);
    return article;
  }

  #follow() {
    if (this.atEnd) this.list.scrollTop = this.list.scrollHeight;
  }
}

/**
 * The model's message: thought, text, tool calls, and what they took. What comes is shown once a frame, so that a fast
 * stream costs no more layouts than the screen has frames.
 */
class Answer {
  constructor(article, grown) {
    this.article = article;
    this.grown = grown;
    this.frame = 0;
    this.unshown = "";
    this.unshownThought = "";
    this.text = "";
    this.shown = 0;
    this.started = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.reason = null;
    this.thought = null;
    this.body = article.appendChild(document.createElement("div"));
    this.markdown = new Markdown(this.body);
    article.classList.add("waiting");
    this.#later();
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    if (content || thought || calls) this.#begin();
    if (thought) this.#think(thought);
    if (content) this.#say(content);
    for (const call of calls ?? []) this.#call(call);
  }

  end(stopped, failure) {
    this.#begin();
    cancelAnimationFrame(this.frame);
    this.#show();
    this.markdown.finish();
    const facts = document.createElement("p");
    facts.className = failure ? "problem" : "facts";
    facts.textContent = failure ? failure.message : this.#facts(stopped);
    this.article.append(facts);
    this.grown();
  }

  #begin() {
    if (this.firstAt === null) this.firstAt = performance.now();
    this.article.classList.remove("waiting");
  }

  #say(content) {
    this.text += content;
    if (this.shown >= MOST_CHARACTERS) return;
    const piece = content.slice(0, MOST_CHARACTERS - this.shown);
    this.shown += piece.length;
    this.unshown += piece;
    if (this.shown >= MOST_CHARACTERS) this.unshown += "\n\n(The rest is not shown.)";
    this.#later();
  }

  #think(thought) {
    this.unshownThought += thought;
    this.#later();
  }

  #later() {
    this.frame ||= requestAnimationFrame(() => {
      this.#show();
      this.grown();
    });
  }

  #show() {
    this.frame = 0;
    if (this.unshown) this.markdown.push(this.unshown);
    if (this.unshownThought) this.#showThought(this.unshownThought);
    this.unshown = this.unshownThought = "";
  }

  #showThought(thought) {
    if (!this.thought) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Thought";
      this.thought = document.createElement("div");
      details.append(summary, this.thought);
      this.article.prepend(details);
    }
    this.thought.append(thought);
  }

  #call(call) {
    const name = call.function?.name;
    this.#say(`${name ? `\n${name} ` : ""}${call.function?.arguments ?? ""}`);
  }

  #facts(stopped) {
    const facts = [];
    if (stopped) facts.push("stopped");
    else if (this.reason === "length") facts.push("cut off at the longest length");
    if (this.usage) {
      const { prompt_tokens: asked, completion_tokens: said, prompt_tokens_details: details } = this.usage;
      const seconds = (performance.now() - this.firstAt) / 1000;
      facts.push(`${asked} tokens read${details?.cached_tokens ? ` (${details.cached_tokens} from the cache)` : ""}`);
      facts.push(`${said} written`, `first after ${((this.firstAt - this.started) / 1000).toFixed(2)} s`);
      if (said > 1 && seconds > 0.05) facts.push(`${((said - 1) / seconds).toFixed(1)} a second`);
    }
    return facts.join(" · ");
  }
}
