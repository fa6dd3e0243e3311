// Small drawings on canvases, sharp on every screen, in the page's colours.

import { plural, seconds } from "./words.js";

// Okabe and Ito's colours that tell sequences apart for every kind of eyes.
export const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];

const taken = new Map();

/** Give each of these sequences a colour that few others have, and keep it; forget all other sequences. */
export function assignColours(numbers) {
  const present = new Set(numbers);
  const uses = COLOURS.map(() => 0);
  for (const [number, slot] of taken) {
    if (present.has(number)) uses[slot] += 1;
    else taken.delete(number);
  }
  for (const number of present) {
    if (taken.has(number)) continue;
    const slot = uses.indexOf(Math.min(...uses));
    uses[slot] += 1;
    taken.set(number, slot);
  }
}

export function colourOf(number) {
  return COLOURS[taken.get(number)];
}

const known = new Map();

/** A colour of style.css. */
export function style(name) {
  if (!known.has(name)) {
    known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return known.get(name);
}

/** Call it when light becomes dark or dark light. */
export function forgetStyles() {
  known.clear();
}

/** Give a canvas a height in CSS pixels and its full resolution; return {context, width, height}. */
export function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Draw values over time as a filled line. */
export function line(canvas, values) {
  const { context, width, height } = fit(canvas, 26);
  if (values.length < 2) return;
  const top = Math.max(...values, 1e-9);
  const x = (index) => (index / (values.length - 1)) * width;
  const y = (value) => height - 1 - (value / top) * (height - 3);
  context.beginPath();
  values.forEach((value, index) => context.lineTo(x(index), y(value)));
  context.strokeStyle = style("--accent");
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(0, height);
  context.fillStyle = `rgba(${style("--level")}, 0.15)`;
  context.fill();
}

/** Draw a histogram over time on a logarithmic axis. */
export function histogram(canvas, { bounds, counts, p50, p99 }) {
  const { context, width, height } = fit(canvas, 110);
  const floor = height - 18;
  const first = Math.max(0, counts.findIndex((count) => count > 0) - 2);
  const last = Math.min(counts.length - 1, counts.findLastIndex((count) => count > 0) + 2);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = style("--soft");
  if (last < 2) {
    context.fillText("Nothing yet", 4, floor / 2);
    return;
  }
  const top = Math.max(...counts);
  const step = width / (last - first + 1);
  for (let index = first; index <= last; index += 1) {
    const size = (counts[index] / top) * (floor - 6);
    const left = (index - first) * step;
    context.fillStyle = style("--accent");
    if (size > 0) context.fillRect(left + 1, floor - Math.max(size, 1.5), Math.max(step - 2, 1), Math.max(size, 1.5));
    if (bounds[index] === p50 || bounds[index] === p99) {
      context.fillStyle = style("--soft");
      context.fillRect(left + step - 0.5, 0, 1, floor);
      if (bounds[index] === p50 || p50 !== p99) {
        const label = bounds[index] === p50 ? "p50" : "p99";
        const room = context.measureText(label).width + 3;
        context.fillText(label, left + step + room < width ? left + step + 3 : left + step - room, 9);
      }
    }
  }
  axis(context, bounds, first, last, step, { floor, width });
}

function axis(context, bounds, first, last, step, { floor, width }) {
  context.fillStyle = style("--line");
  context.fillRect(0, floor, width, 1);
  context.fillStyle = style("--soft");
  let free = 0;
  for (let index = first; index < Math.min(last, bounds.length); index += 1) {
    const label = seconds(bounds[index]);
    const right = (index - first + 1) * step;
    const room = context.measureText(label).width;
    if (right - room / 2 < free || right + room / 2 > width) continue;
    context.fillRect(right - 0.5, floor, 1, 4);
    context.fillText(label, right - room / 2, floor + 15);
    free = right + room / 2 + 14;
  }
}

/** Draw lines from one origin: {points: [seconds, height], colour, isFaint}. */
export function race(canvas, lines) {
  const { context, width, height } = fit(canvas, 120);
  const floor = height - 18;
  const last = Math.max(0.1, ...lines.map(({ points }) => points.at(-1)[0]));
  const most = Math.max(...lines.map(({ points }) => points.at(-1)[1]));
  context.lineWidth = 2.5;
  context.lineJoin = "round";
  for (const { points, colour, isFaint } of lines) {
    context.globalAlpha = isFaint ? 0.4 : 1;
    context.strokeStyle = style(colour);
    context.beginPath();
    for (const [time, count] of points) context.lineTo((time / last) * (width - 2) + 1, floor - 2 - (count / Math.max(most, 1)) * (floor - 20));
    context.stroke();
  }
  context.globalAlpha = 1;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = style("--line");
  context.fillRect(0, floor, width, 1);
  context.fillStyle = style("--soft");
  context.fillText(plural(most, "token"), 1, 10);
  for (const [label, at] of [["0 s", 0], [`${last.toFixed(1)} s`, 1]]) {
    context.fillText(label, at * (width - context.measureText(label).width), height - 3);
  }
}
