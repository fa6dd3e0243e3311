// Messages as they are shown: what a user asked, and the answers to it.

import { copyButton } from "./browser.js";
import { render } from "./markdown.js";

/** An element with a class and a text. */
export function made(tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}

/** A button that is out of use while an answer is written. */
function actionButton(name, onClick) {
  const button = made("button", "small action", name);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

function article(kind, name) {
  const element = made("article", `turn ${kind}`);
  const message = made("div", `message ${kind}`);
  element.append(made("h3", "hidden", name), message);
  return { element, message };
}

/** What a user asked. `onRerun` gets the text that is to be asked instead. */
export class UserView {
  constructor(turn, onRerun) {
    this.turn = turn;
    this.onRerun = onRerun;
    Object.assign(this, article("user", "You"));
    this.message.textContent = turn.text;
    this.edit = actionButton("Edit", () => this.open());
    this.actions = made("div", "actions");
    this.actions.append(copyButton("Copy", () => turn.text), this.edit);
    this.element.append(this.actions);
  }

  open() {
    const form = made("form", "edit");
    const area = made("textarea", "");
    area.value = this.turn.text;
    area.rows = Math.min(12, area.value.split("\n").length + 1);
    area.setAttribute("aria-label", "Edit your message");
    const rerun = made("button", "primary", "Save and rerun");
    const cancel = made("button", "", "Cancel");
    cancel.type = "button";
    const buttons = made("div", "buttons");
    buttons.append(rerun, cancel);
    form.append(area, buttons);
    const leave = () => {
      form.replaceWith(this.message);
      this.actions.hidden = false;
      this.edit.focus();
    };
    const keep = () => area.value.trim() && !this.edit.disabled && this.onRerun(area.value.trim());
    cancel.addEventListener("click", leave);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      keep();
    });
    area.addEventListener("keydown", (event) => onKeys(event, keep, leave));
    this.message.replaceWith(form);
    this.actions.hidden = true;
    area.focus();
  }
}

function onKeys(event, keep, leave) {
  if (event.isComposing || (event.key === "Enter" && event.shiftKey)) return;
  const act = { Enter: keep, Escape: leave }[event.key];
  if (!act) return;
  event.preventDefault();
  event.stopPropagation();
  act();
}

/** The answers to one message, whole or while they come. `on` has chosen() and regenerate(). */
export class AnswerView {
  constructor(turn, on) {
    this.turn = turn;
    this.on = on;
    this.isDue = false;
    Object.assign(this, article("assistant", turn.answers.length > 1 ? "Answers" : "Answer"));
    this.parts = turn.answers.map((answer) => ({ answer, holder: made("div", "answer"), isNew: true }));
    this.meta = made("div", "meta", turn.note);
    this.actions = made("div", "actions");
    if (this.parts.length > 1) this.layOut();
    else {
      this.message.append(this.parts[0].holder);
      this.actions.append(copyButton("Copy", () => turn.answers[0].text));
    }
    this.actions.append(actionButton("Regenerate", () => on.regenerate()));
    this.message.append(this.meta);
    this.element.append(this.actions);
    this.draw();
  }

  /** Several answers below each other, one of which continues the conversation. */
  layOut() {
    this.message.classList.add("answers");
    this.message.setAttribute("role", "group");
    this.message.setAttribute("aria-label", "The chosen answer continues the conversation");
    const group = `answers-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.radios = this.parts.map(({ answer, holder }, index) => {
      const [row, label, radio] = [made("div", "name"), made("label", ""), made("input", "")];
      Object.assign(radio, { type: "radio", name: group, checked: index === this.turn.chosen });
      radio.addEventListener("change", () => this.choose(index));
      label.append(radio, `Answer ${index + 1}`);
      row.append(label, copyButton(`Copy answer ${index + 1}`, () => answer.text));
      this.message.append(row, holder);
      return radio;
    });
    this.mark();
  }

  choose(index) {
    this.turn.chosen = index;
    this.mark();
    this.on.chosen();
  }

  mark() {
    this.parts.forEach(({ holder }, index) => holder.classList.toggle("chosen", index === this.turn.chosen));
  }

  /** Once a message has followed, the choice stands. */
  close() {
    for (const radio of this.radios ?? []) radio.disabled = true;
  }

  add(index, text, thought) {
    const part = this.parts[index];
    part.answer.text += text;
    part.answer.thought += thought;
    part.isNew = true;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isDue = false;
    const list = this.element.parentElement;
    const follows = list && list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    for (const part of this.parts.filter(({ isNew }) => isNew)) {
      part.isNew = false;
      const { text, thought } = part.answer;
      render(part.holder, (thought && `${thought.replace(/^/gm, "> ")}\n\n`) + text);
    }
    if (follows) list.scrollTop = list.scrollHeight;
  }

  /** Show that more comes. */
  begin() {
    this.meta.textContent = "…";
    this.element.setAttribute("aria-busy", "true");
  }

  /** Show the note, and that nothing more comes. */
  finish() {
    this.meta.textContent = this.turn.note;
    this.element.removeAttribute("aria-busy");
    this.draw();
  }
}
