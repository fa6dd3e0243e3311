// One prefix, many questions: six prompts that share a text, beside six that share nothing, on this very server.
//
// A salt keeps a prompt's prefixes apart: one new salt for all six lets them share the text, a new one for
// each lets none of them share anything. All else is equal. Legs alternate, and the first one is not counted.

import { race } from "./charts.js";
import { areSettingsRight, complain } from "./form.js";
import { stream } from "./stream.js";
import { find, seconds } from "./words.js";

const QUESTIONS = [
  "Sum the text up in one sentence.",
  "Which title would suit the text?",
  "Name three facts from the text.",
  "Which numbers does the text mention?",
  "Who or what is the text mostly about?",
  "What would a reader ask next?",
];
const MAX_TOKENS = 32;
const WARM_TOKENS = 4;
// A second round is left out where the first took longer; more than two are for servers that are done at once.
const MAX_FIRST_S = 12;
const ENOUGH_S = 5;
const MAX_ROUNDS = 6;
// Where the first leg takes longer, the built-in text is cut: nobody should wait for a minute.
const MAX_WARM_S = 3.5;
// What is less, or where the rounds of one side reach into the other's, is not told from noise.
const LEAST_DIFFERENCE = 0.05;
const SIDES = [["shared", true, "--accent"], ["apart", false, "--apart"]];

/** Six questions asked at once. */
class Leg {
  constructor(isShared, maxTokens) {
    this.isShared = isShared;
    this.maxTokens = maxTokens;
    this.begun = performance.now();
    this.written = QUESTIONS.map(() => 0);
    this.texts = QUESTIONS.map(() => "");
    this.firsts = [];
    this.points = [[0, 0]];
    this.computed = 0;
    this.elapsed = null;
  }

  get tokens() {
    return this.written.reduce((sum, count) => sum + count, 0);
  }

  get now() {
    return this.elapsed ?? (performance.now() - this.begun) / 1000;
  }

  get rate() {
    return this.tokens / Math.max(this.now, 1e-3);
  }

  async run(model, text, signal) {
    const salt = newSalt();
    const asked = QUESTIONS.map((_, index) => this.ask(index, model, text, this.isShared ? salt : `${salt}-${index}`, signal));
    await Promise.all(asked);
    this.elapsed = this.now;
  }

  async ask(index, model, text, salt, signal) {
    let usage = null;
    for await (const chunk of stream("v1/chat/completions", this.body(index, model, text, salt), signal)) {
      const { content, reasoning_content: thought } = chunk.choices?.[0]?.delta ?? {};
      const isFirst = !this.texts[index] && !this.written[index];
      if (isFirst && (content || thought || chunk.usage?.completion_tokens)) this.firsts.push(this.now);
      this.texts[index] += (content ?? "") + (thought ?? "");
      if (!chunk.usage) continue;
      usage = chunk.usage;
      this.written[index] = usage.completion_tokens;
      this.points.push([this.now, this.tokens]);
    }
    if (usage === null) throw new Error("The server did not say how many tokens it wrote.");
    this.computed += usage.prompt_tokens - (usage.prompt_tokens_details?.cached_tokens ?? 0);
  }

  body(index, model, text, salt) {
    return {
      model: model ?? "",
      messages: [{ role: "user", content: `${text}\n\n${QUESTIONS[index]}` }],
      n: 1,
      temperature: 0,
      max_tokens: this.maxTokens,
      ignore_eos: true,
      cache_salt: salt,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }
}

export class Comparison {
  constructor(chat) {
    this.chat = chat;
    this.legs = [];
    this.stopper = null;
    this.numReplicas = 1;
    find("race").addEventListener("click", () => this.start());
    find("race-cancel").addEventListener("click", () => this.stopper?.abort());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stopper?.abort());
  }

  /** See another snapshot: whether others' requests run beside a leg. */
  see({ counts }) {
    if (this.stopper && counts.live > QUESTIONS.length) this.sawOthers = true;
  }

  async start() {
    const text = find("race-text").value.trim();
    find("race-problem").textContent = "";
    if (this.stopper || !areSettingsRight()) return;
    if (!text) return complain(find("race-text"), "Put a text before the questions first.", "race-problem");
    this.begin();
    try {
      await this.runAll(text, this.stopper.signal);
      this.say(this.verdict());
    } catch (error) {
      const isCancelled = this.stopper.signal.aborted;
      this.stopper.abort();
      this.legs = this.legs.filter(({ elapsed }) => elapsed !== null);
      this.say(isCancelled ? "Cancelled." : "");
      if (!isCancelled) find("race-problem").textContent = error.message;
    } finally {
      this.end();
    }
  }

  begin() {
    this.stopper = new AbortController();
    this.legs = [];
    this.sawOthers = false;
    this.cut = "";
    find("race").disabled = true;
    find("race-cancel").hidden = false;
    find("race-note").textContent = "";
    find("race-figures").hidden = false;
    find("race-answers").replaceChildren();
    this.ticker = setInterval(() => this.draw(), 100);
  }

  end() {
    clearInterval(this.ticker);
    this.stopper = null;
    const hadFocus = document.activeElement === find("race-cancel");
    find("race").disabled = false;
    find("race-cancel").hidden = true;
    if (hadFocus || document.activeElement === document.body) find("race").focus({ preventScroll: true });
    this.draw();
  }

  async runAll(text, signal) {
    if (this.chat.model === null) await this.chat.findModel();
    this.say("Warming up; this is not counted …");
    const warm = new Leg(true, WARM_TOKENS);
    await warm.run(this.chat.model, text, signal);
    text = this.shortened(text, warm.elapsed);
    for (let round = 1; this.wantsRound(round); round += 1) {
      // The one that was last goes first in the next round.
      for (const isShared of round % 2 ? [true, false] : [false, true]) {
        this.say(`Round ${round}: six questions with ${isShared ? "one shared text" : "nothing shared"} …`);
        const leg = new Leg(isShared, MAX_TOKENS);
        this.legs.push(leg);
        await leg.run(this.chat.model, text, signal);
      }
    }
  }

  wantsRound(round) {
    const spent = this.legs.reduce((sum, { elapsed }) => sum + elapsed, 0);
    return round === 1 || (round === 2 ? spent < MAX_FIRST_S : spent < ENOUGH_S && round <= MAX_ROUNDS);
  }

  shortened(text, elapsed) {
    if (elapsed <= MAX_WARM_S || text !== find("race-text").defaultValue.trim()) return text;
    const words = text.split(" ");
    const count = Math.ceil(words.length * Math.max(0.4, MAX_WARM_S / elapsed));
    this.cut = `, with the first ${count} of the text's ${words.length} words as this server is slow or busy now`;
    return words.slice(0, count).join(" ");
  }

  say(words) {
    find("race-said").textContent = words;
  }

  draw() {
    const figures = SIDES.map(([, isShared]) => figuresOf(this.legs.filter((leg) => leg.isShared === isShared)));
    const most = Math.max(1e-9, ...figures.map(({ rate }) => rate ?? 0));
    SIDES.forEach(([name], index) => showFigures(name, figures[index], most));
    const lines = this.legs.map(({ isShared, points, now, tokens }, index) => ({
      points: [...points, [now, tokens]],
      colour: isShared ? SIDES[0][2] : SIDES[1][2],
      isFaint: index < this.legs.length - 2,
    }));
    if (!find("race-figures").hidden) race(find("race-lines"), lines.length ? lines : [{ points: [[0, 0]], colour: "--line" }]);
    this.showAnswers();
  }

  /** The answers of the leg that runs or ran last. */
  showAnswers() {
    const texts = this.legs.at(-1)?.texts ?? [];
    find("race-answers").replaceChildren(...texts.map((text, index) => {
      const [item, question] = [document.createElement("li"), document.createElement("strong")];
      question.textContent = QUESTIONS[index];
      item.append(question, ` ${text}`);
      return item;
    }));
  }

  verdict() {
    const [shared, apart] = SIDES.map(([, isShared]) => figuresOf(this.legs.filter((leg) => leg.isShared === isShared)));
    const rounds = this.legs.length === 2 ? "1 round" : `${this.legs.length / 2} rounds, in which either goes first by turns`;
    const replicas = this.numReplicas > 1 ? `, from ${this.numReplicas} replicas` : "";
    find("race-note").textContent = `${rounds}; ${MAX_TOKENS} tokens an answer${replicas}${this.cut}`;
    const others = this.sawOthers ? " Other requests ran meanwhile, which changes both figures." : "";
    const ratio = shared.rate / apart.rate;
    const isApart = Math.min(...shared.rates) > Math.max(...apart.rates) || Math.max(...shared.rates) < Math.min(...apart.rates);
    if (!isApart || Math.abs(ratio - 1) < LEAST_DIFFERENCE) {
      return `Sharing made no difference that can be told from noise here (${ratio.toFixed(2)} times the tokens/s).${others}`;
    }
    return `With the text shared: ${ratio.toFixed(1)} times the tokens/s, and ` +
      `${(apart.first / shared.first).toFixed(1)} times as fast to the first token.${others}`;
  }
}

/** What legs of one kind come to; null is what is not known yet. */
function figuresOf(legs) {
  if (!legs.length) return { rate: null, rates: [], first: null, computed: null, elapsed: null };
  const whole = legs.filter(({ elapsed }) => elapsed !== null);
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  return {
    rate: legs.reduce((sum, leg) => sum + leg.tokens, 0) / Math.max(legs.reduce((sum, leg) => sum + leg.now, 0), 1e-3),
    rates: whole.map(({ rate }) => rate),
    first: median(legs.filter(({ firsts }) => firsts.length === QUESTIONS.length).flatMap(({ firsts }) => firsts)),
    computed: mean(whole.map(({ computed }) => computed)),
    elapsed: mean(whole.map(({ elapsed }) => elapsed)),
  };
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function showFigures(name, { rate, rates, first, computed, elapsed }, most) {
  const shown = rate === null ? "–" : rate.toFixed(rate < 100 ? 1 : 0);
  const [low, high] = [Math.min(...rates), Math.max(...rates)].map((value) => value.toFixed(0));
  find(`${name}-rate`).textContent = shown;
  find(`${name}-spread`).textContent = rates.length > 1 ? `${low} to ${high}` : "";
  find(`${name}-bar`).style.width = `${(100 * (rate ?? 0)) / most}%`;
  find(`${name}-first`).textContent = seconds(first);
  find(`${name}-computed`).textContent = computed === null ? "–" : Math.round(computed).toLocaleString("en");
  find(`${name}-elapsed`).textContent = seconds(elapsed);
}

function newSalt() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `octavo-page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
