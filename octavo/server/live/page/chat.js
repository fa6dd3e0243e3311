// The chat: one request to /v1/chat/completions at a time, shown as it comes.

import { render } from "./markdown.js";
import { errorOf, eventsOf, headers } from "./stream.js";

const find = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.history = [];
    this.model = null;
    this.stopper = null;
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    find("stop").addEventListener("click", () => this.stopper?.abort());
    find("clear").addEventListener("click", () => this.clear());
    find("key").addEventListener("change", () => this.findModel());
  }

  /** Ask which model there is; also after a key was given. */
  async findModel() {
    try {
      const response = await fetch("v1/models", { headers: headers() });
      if (!response.ok) return;
      this.model = (await response.json()).data[0].id;
      find("model").textContent = this.model;
    } catch {
      // The state beside it says that the server cannot be reached.
    }
  }

  clear() {
    this.stopper?.abort();
    this.history = [];
    find("messages").replaceChildren(find("hint") ?? "");
    find("prompt").focus();
  }

  async send() {
    const text = find("prompt").value.trim();
    if (!text || this.stopper) return;
    find("hint")?.remove();
    find("prompt").value = "";
    this.add("user").textContent = text;
    this.history.push({ role: "user", content: text });
    this.begin();
    const history = this.history;
    try {
      const answers = await this.ask();
      history.push({ role: "assistant", content: answers[0].text });
    } catch (error) {
      history.pop();
      this.add("error", "alert").textContent = error.message;
    } finally {
      this.end();
    }
  }

  begin() {
    this.stopper = new AbortController();
    find("send").disabled = true;
    find("stop").disabled = false;
  }

  end() {
    this.stopper = null;
    find("send").disabled = false;
    find("stop").disabled = true;
  }

  /** Send the history; return the answers, those parts of them that came before a stop. */
  async ask() {
    const stop = this.stopper.signal;
    if (this.model === null) await this.findModel();
    const body = this.body();
    const view = new Answers(this.add("assistant"), body.n);
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: headers({ "Content-Type": "application/json" }),
        body: JSON.stringify(body),
        signal: stop,
      });
      if (!response.ok) throw new Error(await errorOf(response));
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        view.take(JSON.parse(data));
      }
    } catch (error) {
      if (!stop.aborted) {
        view.drop();
        throw error;
      }
    }
    view.finish(stop.aborted);
    return view.answers;
  }

  body() {
    const system = find("system").value.trim();
    const body = {
      model: this.model ?? "",
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.history],
      stream: true,
      stream_options: { include_usage: true },
    };
    for (const name of ["temperature", "top_p", "max_tokens", "n", "seed"]) {
      const value = find(name).valueAsNumber;
      if (!Number.isNaN(value)) body[name] = value;
    }
    body.n ??= 1;
    return body;
  }

  add(kind, role) {
    const message = document.createElement("div");
    message.className = `message ${kind}`;
    if (role) message.setAttribute("role", role);
    find("messages").append(message);
    message.scrollIntoView({ block: "nearest" });
    return message;
  }
}

/** The n answers to one message. */
class Answers {
  constructor(element, count) {
    this.element = element;
    this.begun = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.isDue = false;
    element.classList.toggle("answers", count > 1);
    this.answers = Array.from({ length: count }, (_, index) => {
      const holder = document.createElement("div");
      if (count > 1) element.append(label("name", `Answer ${index + 1}`));
      element.append(holder);
      return { text: "", thought: "", holder, isNew: false };
    });
    this.meta = label("meta", "…");
    element.append(this.meta);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.usage = chunk.usage ?? this.usage;
    for (const choice of chunk.choices ?? []) {
      const answer = this.answers[choice.index];
      const { content = "", reasoning_content: thought = "" } = choice.delta ?? {};
      if (!answer || !(content || thought)) continue;
      this.firstAt ??= performance.now();
      answer.text += content;
      answer.thought += thought;
      answer.isNew = true;
    }
    if (!this.isDue) {
      this.isDue = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    this.isDue = false;
    const list = this.element.parentElement;
    const follows = list && list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    for (const answer of this.answers.filter(({ isNew }) => isNew)) {
      answer.isNew = false;
      const quoted = answer.thought && `${answer.thought.replace(/^/gm, "> ")}\n\n`;
      render(answer.holder, quoted + answer.text);
    }
    if (follows) list.scrollTop = list.scrollHeight;
  }

  finish(isStopped) {
    const said = [];
    if (isStopped) said.push("stopped");
    if (this.firstAt !== null) said.push(`first token after ${Math.round(this.firstAt - this.begun)} ms`);
    if (this.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.usage;
      const cached = prompt_tokens_details?.cached_tokens;
      const elapsed = (performance.now() - (this.firstAt ?? this.begun)) / 1000;
      said.push(`${prompt_tokens} prompt tokens${cached ? `, ${cached} of them cached` : ""}`);
      said.push(`${completion_tokens} written, ${(completion_tokens / Math.max(elapsed, 0.001)).toFixed(0)}/s`);
    }
    this.meta.textContent = said.join(" · ");
    this.draw();
  }

  drop() {
    this.element.remove();
  }
}

function label(kind, text) {
  const element = document.createElement("div");
  element.className = kind;
  element.textContent = text;
  return element;
}
