// Puts the page together: the chat on one side, the engine's snapshots on the other.

import { Chat } from "./chat.js";
import { assignColours, colourOf, forgetStyles, histogram, line } from "./charts.js";
import { Comparison } from "./compare.js";
import { drawLegend, MAX_CACHED, PoolView } from "./pool.js";
import { follow } from "./stream.js";
import { TreeView } from "./tree.js";
import { bytes, find, plural, seconds } from "./words.js";

const MINUTE = 60;
const say = (id, text) => {
  if (find(id).textContent !== text) find(id).textContent = text;
};

const chat = new Chat();
const comparison = new Comparison(chat);
const pool = new PoolView(find("pool"), find("pool-words"), (numbers) => light(numbers));
const tree = new TreeView(find("tree"), find("tree-words"));
// Points in time with the counters that rates are made of.
let past = [];
let rates = [];
let latest = null;
let lit = [];

function light(numbers) {
  lit = numbers;
  pool.light(numbers);
  for (const row of find("requests").rows) row.classList.toggle("lit", numbers.includes(Number(row.dataset.number)));
}

function show(snapshot) {
  say("state", snapshot.state);
  find("state").className = `state ${snapshot.state}`;
  if (!snapshot.pool) return;
  latest = snapshot;
  assignColours([
    ...(snapshot.requests ?? []).map((request) => request.number),
    ...[snapshot.pool, snapshot.pool.occupied].flatMap((cells) => (cells?.parts ?? []).flatMap(([, , numbers]) => numbers)),
  ]);
  if (chat.model === null) chat.findModel();
  comparison.see(snapshot);
  showTiles(snapshot);
  showPool(snapshot.pool);
  tree.show(snapshot.branches ?? [], snapshot.pool.block_size);
  showHistograms(snapshot);
  showRequests(snapshot.requests ?? [], snapshot.counts);
  showLate(snapshot.counts);
}

function showTiles({ counts, pool: blocks, time_s }) {
  if (past.length && counts.output_tokens < past.at(-1).tokens) [past, rates] = [[], []];
  past.push({ time: time_s, tokens: counts.output_tokens });
  while (past.length > 2 && past[1].time <= time_s - 1) past.shift();
  const elapsed = time_s - past[0].time;
  const rate = elapsed > 0 ? (counts.output_tokens - past[0].tokens) / elapsed : 0;
  rates.push({ time: time_s, rate });
  while (rates[0].time < time_s - MINUTE) rates.shift();
  say("rate", rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"));
  line(find("rate-line"), rates.map((entry) => entry.rate));
  say("running", `${counts.running}, ${counts.waiting}`);
  const ended = Object.values(counts.finished).reduce((sum, count) => sum + count, 0);
  say("running-note", `${ended.toLocaleString("en")} done, ${counts.rejected} refused`);
  const looked = counts.looked_up_tokens;
  say("hits", looked ? `${((100 * counts.found_tokens) / looked).toFixed(0)} %` : "–");
  say("hits-note", `${counts.found_tokens.toLocaleString("en")} tokens not computed`);
  const saved = blocks.table_entries - blocks.num_used;
  say("saved", bytes(saved * blocks.bytes_per_block));
  say("saved-note", `${plural(blocks.num_shared, "block")} with many readers`);
}

function showPool(blocks) {
  pool.show(blocks);
  const kinds = [["free", blocks.num_free], ["cached", blocks.num_cached], ["in use", blocks.num_used], ["shared", blocks.num_shared]];
  const sizes = kinds.map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(" · ");
  const text = `${plural(blocks.num_blocks, "block")} of ${plural(blocks.tokens_per_block, "token")}: ${sizes}`;
  const sample = pool.blocksPerCell > 1 && pool.cells.length ? ` (each square: 1 of ${pool.blocksPerCell})` : "";
  say("pool-note", text + sample + (pool.numLeftOut ? ` (${MAX_CACHED} squares of cached ones are drawn)` : ""));
  find("zoom").hidden = !pool.canZoom;
  find("pool").setAttribute("aria-label", `Block pool: ${text}`);
}

function showHistograms({ first_token, inter_token }) {
  for (const [id, buckets] of [["first", first_token], ["inter", inter_token]]) {
    histogram(find(id), buckets);
    say(`${id}-note`, buckets.p50 === null ? "" : `p50 ≤ ${seconds(buckets.p50)}, p99 ≤ ${seconds(buckets.p99)}`);
  }
}

function showRequests(requests, counts) {
  const rows = requests.map((request) => {
    const row = document.createElement("tr");
    row.dataset.number = request.number;
    row.classList.toggle("lit", lit.includes(request.number));
    const name = document.createElement("td");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colourOf(request.number);
    name.append(swatch, `#${request.number} of request ${request.request}`);
    row.append(name);
    const written = `${request.output_tokens} / ${request.max_output_tokens}`;
    const share = request.state === "prefill" ? ` ${Math.floor((100 * request.computed_tokens) / request.prompt_tokens)} %` : "";
    for (const text of [request.state + share, request.prompt_tokens, request.cached_tokens, written, request.blocks, `${request.age_s.toFixed(1)} s`]) {
      row.insertCell().textContent = text;
    }
    return row;
  });
  find("requests").replaceChildren(...rows);
  const more = counts.running + counts.waiting - rows.length;
  say("requests-note", rows.length ? (more > 0 ? `${more} more are not shown` : "") : "none now");
}

function showLate(counts) {
  const late = counts.late_compiled + counts.late_captured + counts.late_allocated;
  const preempted = counts.preemptions ? ` ${plural(counts.preemptions, "preemption")}.` : "";
  say("late", (late
    ? `Late work since the engine was ready: ${counts.late_compiled} compiled, ${counts.late_captured} captured, ${counts.late_allocated} allocated.`
    : "No step had to compile, capture or allocate anything since the engine was ready.") + preempted);
}

function redraw() {
  drawLegend(find("legend"));
  if (!latest) return;
  pool.draw();
  tree.draw();
  comparison.draw();
  showHistograms(latest);
  line(find("rate-line"), rates.map((entry) => entry.rate));
}

find("zoom").addEventListener("click", () => {
  find("zoom").setAttribute("aria-pressed", pool.toggle());
  showPool(latest.pool);
});
find("requests").addEventListener("pointerover", (event) => {
  const row = event.target.closest("tr");
  if (row) light([Number(row.dataset.number)]);
});
find("requests").addEventListener("pointerleave", () => light([]));
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetStyles();
  redraw();
});
function showLost(reason) {
  say("state", `no contact: ${reason}`);
  find("state").className = "state dead";
}

/** Let people switch between the engines of several replicas; the chat goes to whichever is chosen for it. */
function showReplicas(count) {
  const shown = Number(new URLSearchParams(location.search).get("replica") ?? 0);
  find("replicas").hidden = count < 2;
  comparison.numReplicas = count;
  if (find("replicas").children.length === count) return;
  find("replicas").replaceChildren(...Array.from({ length: count }, (_, index) => {
    const link = document.createElement("a");
    link.href = `?replica=${index}`;
    link.textContent = `replica ${index}`;
    if (index === shown) link.setAttribute("aria-current", "page");
    return link;
  }));
}

drawLegend(find("legend"));
chat.findModel();
follow(show, showLost, showReplicas);
