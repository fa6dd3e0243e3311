// The chat: one request to /v1/chat/completions at a time, shown as it comes.

import { load, save } from "./browser.js";
import { areSettingsRight, blame, complain, sampling, systemTurns } from "./form.js";
import { stream, headers } from "./stream.js";
import { AnswerView, made, UserView } from "./turns.js";
import { find } from "./words.js";

export class Chat {
  constructor() {
    this.turns = load();
    this.views = [];
    this.model = null;
    this.stopper = null;
    this.hint = find("hint");
    this.listen();
    // A question whose answer was lost with the page is asked again, if its user likes.
    if (this.turns.at(-1)?.role === "user") find("prompt").value = this.turns.pop().text;
    for (const turn of this.turns) this.show(turn);
    find("messages").scrollTop = find("messages").scrollHeight;
  }

  listen() {
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    find("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    find("clear").addEventListener("click", () => this.clear());
    find("key").addEventListener("change", () => this.findModel());
    window.addEventListener("pagehide", () => this.stopper && save(this.turns));
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

  stop() {
    this.stopper?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.views = [];
    save(this.turns);
    find("messages").replaceChildren(this.hint);
    find("prompt").focus();
  }

  send() {
    const text = find("prompt").value.trim();
    if (this.stopper || !areSettingsRight()) return;
    if (!text) return complain(find("prompt"), "Write a message first.");
    find("prompt").value = "";
    return this.ask(this.turns.length, text);
  }

  /** Drop the turns from a place on, and ask something there instead. After an error all is as before. */
  async ask(place, text) {
    if (this.stopper || !areSettingsRight()) return;
    const [before, isNew] = [this.turns, place === this.turns.length];
    this.turns = before.slice(0, place);
    this.cut(place);
    this.push({ role: "user", text });
    this.begin();
    const [turns, stopper] = [this.turns, this.stopper];
    try {
      await this.answer(stopper.signal);
    } catch (error) {
      if (this.turns === turns) this.restore(before, isNew ? text : "", error);
    } finally {
      this.end(stopper);
    }
  }

  restore(turns, text, error) {
    this.cut(0);
    this.turns = [];
    for (const turn of turns) this.push(turn);
    find("prompt").value = [text, find("prompt").value].filter(Boolean).join("\n");
    this.alert(error);
  }

  alert(error) {
    this.add(made("div", "message error", error.message)).setAttribute("role", "alert");
    blame(error);
  }

  begin() {
    this.stopper = new AbortController();
    this.allow(false);
  }

  end(stopper) {
    if (this.stopper !== stopper) return;
    this.stopper = null;
    this.allow(true);
    save(this.turns);
    // Whoever worked by keyboard goes on where the next message is written.
    const isLost = !document.activeElement || document.activeElement === document.body;
    if (isLost && !matchMedia("(pointer: coarse)").matches) find("prompt").focus();
  }

  allow(isIdle) {
    find("send").disabled = !isIdle;
    find("stop").disabled = isIdle;
    for (const button of find("messages").querySelectorAll("button.action")) button.disabled = !isIdle;
  }

  /** Send the turns; keep the answers, or those parts of them that came before a stop. */
  async answer(signal) {
    const turns = this.turns;
    if (this.model === null) await this.findModel();
    if (this.turns !== turns) return;
    const body = this.body();
    const turn = { role: "assistant", answers: [], chosen: 0, note: "stopped" };
    for (let index = 0; index < body.n; index += 1) turn.answers.push({ text: "", thought: "" });
    const view = this.push(turn);
    this.allow(false);
    view.begin();
    const clock = new Clock();
    try {
      for await (const chunk of stream("v1/chat/completions", body, signal)) clock.note(chunk, view);
    } catch (error) {
      // What has come is worth more than none.
      if (!signal.aborted && clock.firstAt === null) throw error;
      if (!signal.aborted) this.alert(error);
    }
    turn.note = clock.words(signal.aborted);
    view.finish();
  }

  body() {
    const said = this.turns.map(({ role, text, answers, chosen }) => ({ role, content: text ?? answers[chosen].text }));
    return {
      model: this.model ?? "",
      messages: [...systemTurns(), ...said],
      stream: true,
      stream_options: { include_usage: true },
      ...sampling(),
    };
  }

  push(turn) {
    this.turns.push(turn);
    return this.show(turn);
  }

  show(turn) {
    const place = this.views.length;
    this.views.at(-1)?.close?.();
    const view = turn.role === "user"
      ? new UserView(turn, (text) => this.ask(place, text))
      : new AnswerView(turn, {
        chosen: () => save(this.turns),
        regenerate: () => this.ask(place - 1, this.turns[place - 1].text),
      });
    this.views.push(view);
    this.add(view.element);
    return view;
  }

  cut(place) {
    for (const view of this.views.splice(place)) view.element.remove();
    for (const error of find("messages").querySelectorAll(".message.error")) error.remove();
  }

  add(element) {
    this.hint.remove();
    find("messages").append(element);
    element.scrollIntoView({ block: "nearest" });
    return element;
  }
}

/** When the tokens of one request came, and how many. */
class Clock {
  constructor() {
    this.begun = performance.now();
    this.firstAt = null;
    this.usage = null;
  }

  note(chunk, view) {
    this.usage = chunk.usage ?? this.usage;
    for (const { index, delta } of chunk.choices ?? []) {
      const { content, reasoning_content: thought } = delta ?? {};
      if (!(content || thought) || !view.parts[index]) continue;
      this.firstAt ??= performance.now();
      view.add(index, content ?? "", thought ?? "");
    }
  }

  words(isStopped) {
    const said = isStopped ? ["stopped"] : [];
    if (this.firstAt !== null) said.push(`first token after ${Math.round(this.firstAt - this.begun)} ms`);
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: details } = this.usage;
      const cached = details?.cached_tokens;
      const elapsed = (performance.now() - (this.firstAt ?? this.begun)) / 1000;
      said.push(`${prompt} prompt tokens${cached ? `, ${cached} of them cached` : ""}`);
      said.push(`${written} written, ${(written / Math.max(elapsed, 0.001)).toFixed(0)}/s`);
    }
    return said.join(" · ");
  }
}
