// A small part of Markdown. Every text goes through textContent: nothing that a model writes becomes HTML.

import { copyButton } from "./browser.js";

const INLINE =
  /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|(\[[^[\]\n]{1,200}\]\(https?:\/\/[^\s()]{1,1000}\))/g;

/** Replace an element's content by text in Markdown. */
export function render(element, text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) at = block(lines, at, blocks);
  element.replaceChildren(...blocks);
}

function block(lines, at, blocks) {
  const line = lines[at];
  if (!line.trim()) return at + 1;
  if (line.trimStart().startsWith("```")) return fence(lines, at, blocks);
  const heading = /^#{1,6}\s+(.*)/.exec(line);
  if (heading) {
    blocks.push(made("h4", heading[1]));
    return at + 1;
  }
  if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) {
    blocks.push(document.createElement("hr"));
    return at + 1;
  }
  if (itemOf(line)) return list(lines, at, blocks);
  if (isTable(lines, at)) return table(lines, at, blocks);
  return paragraph(lines, at, blocks);
}

function fence(lines, at, blocks) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith("```")) end += 1;
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = lines.slice(at + 1, end).join("\n");
  pre.append(code);
  blocks.push(scrolling(pre, "code", "Code"));
  blocks.at(-1).append(copyButton("Copy code", () => code.textContent));
  return end + 1;
}

/** What is too wide moves in a frame of its own, which a keyboard can reach. */
function scrolling(element, kind, name) {
  const [holder, frame] = [document.createElement("div"), document.createElement("div")];
  holder.className = kind;
  frame.className = "scroll";
  frame.tabIndex = 0;
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", name);
  frame.append(element);
  holder.append(frame);
  return holder;
}

function isTable(lines, at) {
  return lines[at].includes("|") && /^ {0,3}\|?( *:?-+:? *\|)+( *:?-+:? *)?$/.test(lines[at + 1] ?? "");
}

function table(lines, at, blocks) {
  const element = document.createElement("table");
  row(element.createTHead(), lines[at], "th");
  const body = element.createTBody();
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) row(body, lines[at], "td");
  blocks.push(scrolling(element, "table", "Table"));
  return at;
}

function row(section, line, tag) {
  const cells = line.trim().replace(/^\||\|$/g, "").split("|");
  section.insertRow().append(...cells.map((cell) => made(tag, cell.trim())));
}

function itemOf(line) {
  return /^\s{0,8}([-*+]|\d{1,4}[.)])\s+(.*)/.exec(line);
}

function list(lines, at, blocks) {
  const isOrdered = /\d/.test(itemOf(lines[at])[1]);
  const element = document.createElement(isOrdered ? "ol" : "ul");
  if (isOrdered) element.start = parseInt(itemOf(lines[at])[1], 10);
  let item = itemOf(lines[at]);
  while (item && /\d/.test(item[1]) === isOrdered) {
    element.append(made("li", item[2]));
    at += 1;
    item = at < lines.length && itemOf(lines[at]);
  }
  blocks.push(element);
  return at;
}

function paragraph(lines, at, blocks) {
  const isQuote = lines[at].startsWith(">");
  const element = document.createElement(isQuote ? "blockquote" : "p");
  const begin = at;
  do {
    if (at > begin) element.append(document.createElement("br"));
    inline(element, isQuote ? lines[at].replace(/^>\s?/, "") : lines[at]);
    at += 1;
  } while (at < lines.length && continues(lines[at], isQuote) && !isTable(lines, at));
  blocks.push(element);
  return at;
}

function continues(line, isQuote) {
  if (!line.trim() || line.startsWith(">") !== isQuote) return false;
  return isQuote || !(/^#{1,6}\s/.test(line) || line.trimStart().startsWith("```") || itemOf(line));
}

function made(tag, text) {
  const element = document.createElement(tag);
  inline(element, text);
  return element;
}

function inline(element, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    element.append(text.slice(at, match.index), span(match));
    at = match.index + match[0].length;
  }
  element.append(text.slice(at));
}

function span([whole, code, strong, emphasis]) {
  if (code) return plain("code", whole.slice(1, -1));
  if (strong) return plain("strong", whole.slice(2, -2));
  if (emphasis) return plain("em", whole.slice(1, -1));
  const middle = whole.indexOf("](");
  const link = plain("a", whole.slice(1, middle));
  link.href = whole.slice(middle + 2, -1);
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  return link;
}

function plain(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}
