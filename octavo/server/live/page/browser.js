// What the page asks of the browser: a place for the conversation, and the clipboard. The key is never kept.

const PLACE = `octavo.chat ${location.pathname}`;
const MAX_TURNS = 200;
const MAX_CHARS = 400_000;

/** Return the turns that were kept and can be read; the first is a user's. */
export function load() {
  try {
    const turns = JSON.parse(localStorage.getItem(PLACE)) ?? [];
    return turns.every(isTurn) ? fromUser(turns) : [];
  } catch {
    return [];
  }
}

/** Keep the newest turns that fit. A browser that lets nothing be kept loses them on a reload, no more. */
export function save(turns) {
  let kept = fromUser(turns.slice(-MAX_TURNS));
  let text = JSON.stringify(kept);
  while (text.length > MAX_CHARS) {
    kept = fromUser(kept.slice(1));
    text = JSON.stringify(kept);
  }
  try {
    if (kept.length) localStorage.setItem(PLACE, text);
    else localStorage.removeItem(PLACE);
  } catch {
    return;
  }
}

function fromUser(turns) {
  const first = turns.findIndex(({ role }) => role === "user");
  return first < 0 ? [] : turns.slice(first);
}

function isTurn(turn) {
  if (turn.role === "user") return typeof turn.text === "string";
  const { answers, chosen, note } = turn;
  const isText = ({ text, thought }) => typeof text === "string" && typeof thought === "string";
  return turn.role === "assistant" && answers.every(isText) && Number.isInteger(chosen) && isText(answers[chosen]) && typeof note === "string";
}

/** A button that copies what `text` returns, and says so. */
export function copyButton(name, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.textContent = "Copy";
  if (name !== "Copy") button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    const said = (await copy(text())) ? "Copied" : "Not copied";
    button.textContent = said;
    document.getElementById("said").textContent = said;
    setTimeout(() => {
      button.textContent = "Copy";
      document.getElementById("said").textContent = "";
    }, 1500);
  });
  return button;
}

/** Whether a text was copied; the older way is for pages that are not served over TLS or from this machine. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const [before, area] = [document.activeElement, document.createElement("textarea")];
    area.className = "hidden";
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    before?.focus();
    return isDone;
  }
}
