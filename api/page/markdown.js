/**
 * Markdown as it streams in, as DOM nodes. What a model says is untrusted: text only ever becomes text nodes, elements
 * come from the short list below, and links lead to http, https or mailto. Images are shown as links.
 *
 * Finished lines are never looked at again, an open line that grows long is taken as it is, and long blocks go on in a
 * new node, so that the work is linear in the text.
 */

const LONG_PARAGRAPH = 4000;
const LONG_LINE = 20000;
const LONG_CODE_LINES = 200;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/s;
const ITEM = /^\s*([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?(.*)$/s;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`{1,8})([^`]+)\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|!?\[([^\]\n]{0,200})\]\(([^)\s]{1,2000})\)|(https?:\/\/[^\s<>()"']{1,2000})/g;

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

/** A link if its address is harmless, else its text. */
function link(text, address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return text;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return text;
  const made = element("a", text || address);
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.title = url.href.slice(0, 200);
  return made;
}

/** Nodes of one paragraph's text. */
export function inline(text) {
  if (text.length > LONG_LINE) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, ticks, code, strong, emphasis, label, address, bare] = match;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    if (ticks) nodes.push(element("code", code));
    else if (strong) nodes.push(element("strong", strong));
    else if (emphasis) nodes.push(element("em", emphasis));
    else if (bare) nodes.push(link(bare, bare));
    else nodes.push(link(label, address));
    end = match.index + whole.length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** Shows pieces of markdown below `root` as they come. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.line = ""; // the line that has not ended
    this.block = null; // the open block: {kind, node, text, ...}
    this.tail = null; // how the open line shows in a fence
    this.shown = null; // and elsewhere
  }

  push(text) {
    const lines = (this.line + text).split("\n");
    this.line = lines.pop();
    for (const line of lines) this.#take(line);
    this.#preview();
  }

  finish() {
    if (this.line) this.#take(this.line);
    this.line = "";
    this.#close();
  }

  #take(line) {
    if (this.block?.kind === "fence") {
      this.#inFence(line);
      return;
    }
    this.#withoutPreview();
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    const quote = QUOTE.exec(line);
    if (fence) this.#openFence(fence);
    else if (!line.trim()) this.#close();
    else if (RULE.test(line)) this.#alone(element("hr"));
    else if (heading) this.#alone(element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
    else if (item) this.#item(item);
    else if (quote) this.#flow("blockquote", quote[1]);
    else this.#flow("p", line);
  }

  /** What the unfinished line looks like so far. */
  #preview() {
    if (!this.line) return;
    if (this.block?.kind === "fence") {
      this.tail ??= this.block.node.appendChild(document.createTextNode(""));
      this.tail.appendData(this.line.slice(this.tail.length));
    } else if (this.line.length > LONG_PARAGRAPH) {
      this.#withoutPreview();
      this.#flow("p", this.line);
      this.line = "";
      this.block.runsOn = true;
    } else {
      this.shown ??= this.root.appendChild(element("p"));
      this.shown.textContent = this.line;
    }
  }

  #withoutPreview() {
    this.shown?.remove();
    this.shown = null;
  }

  #openFence([, marks]) {
    this.#close();
    const code = element("code");
    this.root.append(element("pre", code));
    this.block = { kind: "fence", marks, node: code, lines: 0 };
  }

  #inFence(line) {
    const { marks } = this.block;
    this.tail?.remove();
    this.tail = null;
    const closing = line.trim();
    if (closing.length >= marks.length && closing === marks[0].repeat(closing.length)) this.#close();
    else this.#code(`${line}\n`);
  }

  #code(line) {
    const block = this.block;
    if (block.lines++ === LONG_CODE_LINES) {
      block.lines = 1;
      block.node = block.node.parentElement.appendChild(element("code"));
    }
    block.node.append(line);
  }

  #alone(node) {
    this.#close();
    this.root.append(node);
  }

  #item([, mark, text]) {
    const kind = /\d/.test(mark) ? "ol" : "ul";
    if (this.block?.kind !== kind) {
      this.#close();
      const node = element(kind);
      if (kind === "ol") node.start = Number.parseInt(mark, 10);
      this.root.append(node);
      this.block = { kind, node };
    }
    this.block.node.append(element("li", ...inline(text)));
  }

  /** A line of a paragraph or a quotation; lines in a list go on with its last item. */
  #flow(kind, text) {
    const block = this.block;
    if (kind === "p" && ["ul", "ol"].includes(block?.kind)) {
      block.node.lastElementChild.append("\n", ...inline(text.trim()));
      return;
    }
    const long = block?.node.textContent.length > LONG_PARAGRAPH;
    if (block?.kind !== kind || long) {
      if (long) block.node.classList.add("goes-on");
      this.#close();
      const node = element(kind, ...inline(text));
      this.root.append(node);
      this.block = { kind, node };
      return;
    }
    if (!block.runsOn) block.node.append("\n");
    block.runsOn = false;
    block.node.append(...inline(text));
  }

  #close() {
    this.#withoutPreview();
    this.tail = null;
    this.block = null;
  }
}
