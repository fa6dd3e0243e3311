// The block pool: one square per block, coloured by who reads it.

import { COLOURS, colourOf, fit, style } from "./charts.js";
import { blockWords } from "./words.js";

const STRIPES = 4;
// A larger pool shows blocks in use, and cached ones behind them, unless people want to see it whole.
const MAX_WHOLE = 512;
export const MAX_CACHED = 256;

/** Draw one block into a square. */
export function drawBlock(context, left, top, size, { readers, colours }) {
  const gap = size > 7 ? 2 : size > 4 ? 1 : 0.5;
  const side = size - gap;
  if (readers < 0) {
    context.strokeStyle = style("--free");
    context.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
    return;
  }
  context.fillStyle = readers === 0 || !colours.length ? style("--cached") : colours[0];
  context.fillRect(left, top, side, side);
  if (readers === 0) {
    context.fillStyle = style("--card");
    context.beginPath();
    context.moveTo(left, top + side);
    context.lineTo(left + side, top);
    context.lineTo(left + side, top + side * 0.3);
    context.lineTo(left + side * 0.3, top + side);
    context.fill();
  }
  if (readers > 1) drawShared(context, left, top, side, { readers, colours });
}

/** A shared block has a stripe of each reader's colour, a frame, and the number of readers if there is room. */
function drawShared(context, left, top, side, { readers, colours }) {
  const shown = colours.slice(0, STRIPES);
  const width = side / shown.length;
  shown.forEach((colour, index) => {
    context.fillStyle = colour;
    context.fillRect(left + index * width, top, width + 0.3, side);
  });
  const ink = style("--ink");
  context.strokeStyle = ink;
  context.lineWidth = side > 9 ? 1.5 : 1;
  context.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
  context.lineWidth = 1;
  if (side < 15) return;
  const label = readers > 99 ? "99+" : String(readers);
  context.font = `700 ${Math.min(11, side * 0.5)}px system-ui, sans-serif`;
  const room = context.measureText(label).width + 3;
  context.fillStyle = style("--card");
  const height = Math.min(12, side * 0.55);
  context.fillRect(left + (side - room) / 2, top + (side - height) / 2, room, height);
  context.fillStyle = ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(label, left + side / 2, top + side / 2 + 0.5);
}

export class PoolView {
  constructor(canvas, words, onPoint) {
    this.canvas = canvas;
    this.words = words;
    this.onPoint = onPoint;
    this.cells = [];
    this.at = -1;
    this.lit = new Set();
    this.isWhole = false;
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("focus", () => this.at < 0 && this.point(0));
    canvas.addEventListener("blur", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.walk(event));
  }

  get canZoom() {
    return this.pool.num_blocks > MAX_WHOLE;
  }

  /** Show the whole pool, or again only its most interesting blocks; return whether it is whole. */
  toggle() {
    this.isWhole = !this.isWhole;
    this.at = -1;
    return this.isWhole;
  }

  /** Show another snapshot's pool. */
  show(pool) {
    this.pool = pool;
    const isZoomed = this.canZoom && !this.isWhole;
    const { runs, parts } = isZoomed && pool.occupied ? pool.occupied : pool;
    this.blocksPerCell = isZoomed && pool.occupied ? 1 : pool.blocks_per_cell;
    this.cells = [];
    for (const [length, readers, index] of runs) {
      const part = index < 0 ? null : parts[index];
      const numbers = part && readers > 0 ? part[2].slice(0, readers) : [];
      const cell = { readers, part, numbers, colours: numbers.map(colourOf) };
      for (let count = 0; count < length; count += 1) this.cells.push(cell);
    }
    this.blocks = this.cells.map((_, index) => index * this.blocksPerCell);
    this.numLeftOut = 0;
    if (isZoomed) this.zoom();
    if (this.at >= this.cells.length) this.at = -1;
    this.explain();
    // Those that read the block may be others by now.
    if (this.at >= 0) this.onPoint(this.cells[this.at].numbers);
    else this.draw();
  }

  zoom() {
    const places = [...this.cells.keys()];
    const used = places.filter((place) => this.cells[place].readers > 0);
    const cached = places.filter((place) => this.cells[place].readers === 0);
    const shown = [...used, ...cached.slice(0, MAX_CACHED)];
    this.numLeftOut = used.length + cached.length - shown.length;
    this.blocks = shown.map((place) => this.blocks[place]);
    this.cells = shown.map((place) => this.cells[place]);
  }

  /** Light up the blocks that any of these sequences reads. */
  light(numbers) {
    this.lit = new Set(numbers);
    this.draw();
  }

  draw() {
    if (!this.pool) return;
    const width = this.canvas.clientWidth;
    const count = this.cells.length;
    if (!count) {
      const { context } = fit(this.canvas, 30);
      context.font = "12px system-ui, sans-serif";
      context.fillStyle = style("--soft");
      context.fillText("All blocks are free. Ask something, and they fill.", 4, 18);
      return;
    }
    const wanted = Math.sqrt((width * Math.min(this.canZoom && !this.isWhole ? 180 : 300, width * 0.6)) / count);
    this.size = Math.max(4, Math.min(28, Math.floor(wanted)));
    this.columns = Math.max(1, Math.floor((width - 1) / this.size));
    // Squares fill the whole width; their corners are rounded to pixels.
    this.size = (width - 1) / this.columns;
    const { context } = fit(this.canvas, Math.ceil(Math.ceil(count / this.columns) * this.size) + 2);
    this.cells.forEach((cell, index) => {
      context.globalAlpha = this.lit.size && !this.isLit(cell) ? 0.35 : 1;
      const [left, top] = this.corner(index);
      drawBlock(context, left, top, Math.floor(this.size), cell);
    });
    context.globalAlpha = 1;
    if (this.at >= 0) this.drawCursor(context);
  }

  drawCursor(context) {
    const [left, top] = this.corner(this.at);
    context.strokeStyle = style("--ink");
    context.lineWidth = 2;
    context.strokeRect(left, top, Math.floor(this.size) - 1, Math.floor(this.size) - 1);
    context.lineWidth = 1;
  }

  isLit(cell) {
    return cell.readers > 0 && cell.numbers.some((number) => this.lit.has(number));
  }

  corner(index) {
    const [column, row] = [index % this.columns, Math.floor(index / this.columns)];
    return [Math.round(column * this.size) + 1, Math.round(row * this.size) + 1];
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - 1) / this.size);
    const row = Math.floor((event.clientY - box.top - 1) / this.size);
    const index = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && index < this.cells.length ? index : -1;
  }

  walk(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.cells.length - 1;
    let next = this.at + (steps[event.key] ?? 0);
    if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else if (!(event.key in steps)) return;
    event.preventDefault();
    if (next >= 0 && next <= last) this.point(next);
  }

  point(index) {
    if (index === this.at) return;
    this.at = index;
    const cell = this.cells[index];
    this.onPoint(cell ? cell.numbers : []);
    this.explain();
  }

  explain() {
    const cell = this.cells[this.at];
    const words = cell ? blockWords(this.pool, this.blocks[this.at], cell, this.blocksPerCell) : "Point at a block, or walk with the arrow keys.";
    if (this.words.textContent !== words) this.words.textContent = words;
  }
}

/** Fill a list with one example of each kind of block. */
export function drawLegend(list) {
  const kinds = [
    ["free", { readers: -1, colours: [] }],
    ["cached, nobody reads it", { readers: 0, colours: [] }],
    ["one sequence's", { readers: 1, colours: COLOURS.slice(0, 1) }],
    ["one block, many readers", { readers: 3, colours: COLOURS.slice(0, 3) }],
  ];
  const items = kinds.map(([label, cell]) => {
    const item = document.createElement("li");
    const canvas = document.createElement("canvas");
    item.append(canvas, label);
    return [item, canvas, cell];
  });
  list.replaceChildren(...items.map(([item]) => item));
  for (const [, canvas, cell] of items) drawBlock(fit(canvas, 16).context, 0, 0, 17, cell);
}
