// The prefix tree as an icicle: what continues a branch hangs below it.

import { fit, style } from "./charts.js";
import { branchWords, plural } from "./words.js";

const ROW = 26;
const MAX_ROWS = 8;
// What is only cached takes at most this part of the width that is read.
const UNREAD_SHARE = 0.3;

export class TreeView {
  constructor(canvas, words) {
    this.canvas = canvas;
    this.words = words;
    this.branches = [];
    this.boxes = [];
    // The first block of the branch that is explained: it stays the same when others come.
    this.block = null;
    canvas.addEventListener("pointermove", (event) => this.point(this.boxAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.boxAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(undefined));
    canvas.addEventListener("focus", () => this.block === null && this.point(this.boxes[0]));
    canvas.addEventListener("blur", () => this.point(undefined));
    canvas.addEventListener("keydown", (event) => this.walk(event));
  }

  /** Show another snapshot's branches. */
  show(branches, blockSize) {
    this.branches = branches;
    this.blockSize = blockSize;
    this.children = branches.map(() => []);
    this.top = [];
    branches.forEach(([parent], index) => (parent < 0 ? this.top : this.children[parent]).push(index));
    for (const list of [this.top, ...this.children]) list.sort((a, b) => this.rank(b) - this.rank(a));
    this.draw();
    this.explain();
  }

  rank(index) {
    const [, , , readers, hits] = this.branches[index];
    return readers * 1e6 + hits;
  }

  draw() {
    this.boxes = [];
    const weights = this.weigh();
    const total = this.top.reduce((sum, index) => sum + weights[index], 0);
    this.place(this.top, 0, 0, this.canvas.clientWidth / Math.max(total, 1e-9), weights);
    const depth = 1 + Math.max(0, ...this.boxes.map((box) => box.depth));
    const { context, width } = fit(this.canvas, depth * ROW);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    if (!this.boxes.length) {
      context.fillStyle = style("--soft");
      context.fillText("No prefix is kept yet", 4, ROW / 2);
      return;
    }
    const most = Math.max(1, ...this.branches.map((branch) => branch[4]));
    for (const box of this.boxes) this.drawBox(context, box, most, width);
  }

  /** Width of each branch: its readers, or those of what hangs below it. What nobody reads gets what is left. */
  weigh() {
    const numRead = this.top.reduce((sum, index) => sum + this.branches[index][3], 0);
    const numUnread = this.branches.filter((branch) => !branch[3]).length;
    const least = numRead ? Math.min(0.6, (UNREAD_SHARE * numRead) / numUnread) : 0.6;
    const weights = this.branches.map((branch) => Math.max(branch[3], least));
    for (let index = this.branches.length - 1; index >= 0; index -= 1) {
      const below = this.children[index].reduce((sum, child) => sum + weights[child], 0);
      weights[index] = Math.max(weights[index], below);
    }
    return weights;
  }

  place(indices, depth, left, scale, weights) {
    if (depth >= MAX_ROWS) return;
    for (const index of indices) {
      const width = weights[index] * scale;
      this.boxes.push({ index, depth, left, width });
      this.place(this.children[index], depth + 1, left, scale, weights);
      left += width;
    }
  }

  drawBox(context, { index, depth, left, width }, most) {
    const [, blockId, numBlocks, numReaders, numHits] = this.branches[index];
    const top = depth * ROW;
    const room = Math.max(width - 2, 1);
    const level = 0.14 + 0.56 * Math.sqrt(numHits / most);
    context.fillStyle = numReaders ? `rgba(${style("--level")}, ${level})` : style("--free");
    context.fillRect(left, top, room, ROW - 3);
    if (blockId === this.block) {
      context.strokeStyle = style("--ink");
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, room - 2, ROW - 5);
    }
    const label = this.label(context, numBlocks, numReaders, numHits, room - 10);
    context.fillStyle = numReaders && level > 0.5 ? style("--on-accent") : style("--ink");
    if (label) context.fillText(label, left + 5, top + (ROW - 3) / 2 + 0.5);
  }

  label(context, numBlocks, numReaders, numHits, room) {
    const long = `${numBlocks} blk · ${numReaders} reading · ${plural(numHits, "hit")}`;
    const middle = `${numBlocks} blk · ${numReaders} reading`;
    return [long, middle, `${numBlocks} blk`, `${numBlocks}`].find((label) => context.measureText(label).width <= room);
  }

  boxAt(event) {
    const area = this.canvas.getBoundingClientRect();
    const [x, depth] = [event.clientX - area.left, Math.floor((event.clientY - area.top) / ROW)];
    return this.boxes.find((box) => box.depth === depth && x >= box.left && x < box.left + box.width);
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = this.boxes.findIndex((box) => this.branches[box.index][1] === this.block);
    const next = this.boxes[at + step];
    if (next) this.point(next);
  }

  point(box) {
    const block = box ? this.branches[box.index][1] : null;
    if (block === this.block) return;
    this.block = block;
    this.draw();
    this.explain();
  }

  explain() {
    const index = this.branches.findIndex((branch) => branch[1] === this.block);
    const words = index < 0
      ? "Point at a branch, or walk with the arrow keys."
      : branchWords(this.branches[index], this.children[index].length, this.blockSize);
    if (this.words.textContent !== words) this.words.textContent = words;
  }
}
