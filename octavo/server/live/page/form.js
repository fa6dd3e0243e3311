// The settings of the chat: what they are, and what is wrong with them.

import { find } from "./words.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "n", "seed"];

/** What the settings ask for; what is empty is left to the server. */
export function sampling() {
  const asked = {};
  for (const name of NUMBERS) {
    const value = find(name).valueAsNumber;
    if (!Number.isNaN(value)) asked[name] = value;
  }
  return { n: 1, ...asked };
}

export function systemTurns() {
  const content = find("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** Whether all settings can be sent. If one cannot, say why, and go to it. */
export function areSettingsRight() {
  quiet();
  for (const field of [...NUMBERS, "key"].map(find)) {
    const reason = reasonAgainst(field);
    if (reason) return complain(field, reason);
  }
  return true;
}

/** Say what is wrong with a field, and go to it, also if the panel that holds it is closed. Returns false. */
export function complain(field, reason, place = "problem") {
  quiet();
  const panel = field.closest("details");
  if (panel) panel.open = true;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", place);
  field.addEventListener("input", quiet, { once: true });
  find(place).textContent = reason;
  field.focus();
  return false;
}

/** Go to the setting that a server's error is about, if it is about one. */
export function blame({ setting, message }) {
  if ([...NUMBERS, "key"].includes(setting)) complain(find(setting), message);
}

function quiet() {
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    find(field.getAttribute("aria-describedby")).textContent = "";
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
}

function reasonAgainst(field) {
  const { validity, valueAsNumber: value } = field;
  const name = field.labels[0].firstChild.textContent.trim();
  const isWhole = field.step === "1";
  if (validity.badInput) return `${name} must be a number.`;
  const isOutside = validity.rangeUnderflow || validity.rangeOverflow || value <= Number(field.dataset.above);
  if (isOutside || (isWhole && validity.stepMismatch)) {
    return `${name} must be ${isWhole ? "a whole number" : "a number"} ${rangeOf(field)}; it is ${value}.`;
  }
  return validity.patternMismatch ? `${name} must be visible ASCII characters without spaces.` : "";
}

function rangeOf({ min, max, dataset }) {
  return dataset.above === undefined ? `from ${min} to ${max}` : `above ${dataset.above} and at most ${max}`;
}
