// What people read about a block, a branch or a number, and where.

export const find = (id) => document.getElementById(id);

export function plural(count, what) {
  return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : what.endsWith("ch") ? "es" : "s"}`;
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${+(value * 1000).toPrecision(2)} ms`;
  return value < 100 ? `${+value.toPrecision(2)} s` : `${Math.round(value)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** Names of sequences, such as "#3, #4 and #7". */
export function names(numbers, count) {
  const listed = numbers.map((number) => `#${number}`);
  const more = count - listed.length;
  if (more > 0) listed.push(`${more} more`);
  return listed.length < 2 ? listed.join("") : `${listed.slice(0, -1).join(", ")} and ${listed.at(-1)}`;
}

/** Explain a block of the pool, which may stand for some more. */
export function blockWords(pool, block, { readers, part }, numBlocks) {
  const name = `Block ${block.toLocaleString("en")}`;
  const sample = numBlocks > 1 ? ` It stands for ${numBlocks} blocks.` : "";
  if (readers < 0) return `${name} is free: nothing in it can be used again.${sample}`;
  if (readers === 0) {
    return `${name} is cached: nobody reads it now, but a prompt that begins alike finds it, and need not ` +
      `compute its ${pool.tokens_per_block} tokens again.${sample}`;
  }
  const [begin, end, numbers] = part ?? [0, 0, []];
  const tokens = part ? ` It lies within tokens ${begin.toLocaleString("en")} to ${(end - 1).toLocaleString("en")}.` : "";
  if (readers === 1) {
    return `${name} belongs to sequence ${names(numbers, 1) || "of another turn"} alone.${tokens}${sample}`;
  }
  return `${name} is one block with ${readers} readers: sequences ${names(numbers, readers)}. It is held once, ` +
    `where copies would take ${readers} blocks.${tokens}${sample}`;
}

/** Explain a branch of the prefix tree. */
export function branchWords(branch, numBelow, blockSize) {
  const [parent, blockId, numBlocks, numReaders, numHits, isCut] = branch;
  const where = parent < 0 ? "A beginning of prompts" : "A continuation";
  const readers = numReaders ? `read by ${plural(numReaders, "sequence")} now` : "cached, with no reader now";
  const below = numBelow ? ` ${plural(numBelow, "branch")} ${numBelow === 1 ? "continues" : "continue"} it.` : "";
  return `${where}: ${plural(numBlocks, "block")} (${plural(numBlocks * blockSize, "token")}) from block ` +
    `${blockId.toLocaleString("en")} on, ${readers}. Lookups found it ${isCut ? "at least " : ""}` +
    `${plural(numHits, "time")}.${below}${isCut ? " More hangs below that is not shown." : ""}`;
}
