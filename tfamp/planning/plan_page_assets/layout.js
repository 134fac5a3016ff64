// A layered layout: boxes in rows, edges downwards. It knows sizes and edges, nothing of plans.
//
// Steps: rank the boxes, divide rows that are too wide, let long edges pass rows through bends, order
// the rows against crossings, place boxes near their neighbours. Parts that no edge connects are laid
// out by themselves and packed side by side.

const BOX_GAP = 16;
const ROW_GAP = 22;
const MAX_ROW_WIDTH = 1500;
const BEND_WIDTH = 4;
const BEND_GAP = 8;
// With more bends than this, long edges are drawn straight: the order of rows would take too long.
const MAX_BENDS = 6000;
const ORDER_SWEEPS = 8;
const PLACE_SWEEPS = 24;

// Sets x and y (top left corner) of each box {w, h, order} and points of each edge {from, to}.
function layered(boxes, edges) {
  const parts = connectedParts(boxes, edges);
  for (const part of parts) layOutPart(part);
  return pack(parts);
}

function connectedParts(boxes, edges) {
  const leader = new Map(boxes.map((box) => [box, box]));
  const find = (box) => {
    while (leader.get(box) !== box) {
      leader.set(box, leader.get(leader.get(box)));
      box = leader.get(box);
    }
    return box;
  };
  for (const edge of edges) leader.set(find(edge.from), find(edge.to));
  const parts = new Map();
  for (const box of boxes) {
    if (!parts.has(find(box))) parts.set(find(box), { boxes: [], edges: [] });
    parts.get(find(box)).boxes.push(box);
  }
  for (const edge of edges) parts.get(find(edge.from)).edges.push(edge);
  // Boxes without edges come last, together.
  return [...parts.values()].sort((a, b) => (a.boxes.length === 1) - (b.boxes.length === 1));
}

// Parts in rows like words of a text, about as wide as high.
function pack(parts) {
  const area = parts.reduce((sum, part) => sum + (part.w + BOX_GAP) * (part.h + ROW_GAP), 0);
  const width = Math.max(Math.sqrt(area * 1.8), ...parts.map((part) => part.w));
  const size = { w: 0, h: 0 };
  let [x, y, high] = [0, 0, 0];
  for (const part of parts) {
    if (x && x + part.w > width) [x, y, high] = [0, y + high + ROW_GAP * 1.5, 0];
    movePart(part, x, y);
    x += part.w + BOX_GAP * 1.5;
    high = Math.max(high, part.h);
    size.w = Math.max(size.w, x - BOX_GAP * 1.5);
    size.h = Math.max(size.h, y + part.h);
  }
  return size;
}

function movePart(part, dx, dy) {
  for (const box of part.boxes) {
    box.x += dx;
    box.y += dy;
  }
  for (const edge of part.edges) edge.points = edge.points.map(([x, y]) => [x + dx, y + dy]);
}

function layOutPart(part) {
  if (part.boxes.length === 1) {
    const [box] = part.boxes;
    Object.assign(box, { x: 0, y: 0 });
    Object.assign(part, { w: box.w, h: box.h });
    return;
  }
  rankBoxes(part);
  divideWideRows(part.boxes);
  const rows = makeRows(part);
  orderRows(rows);
  placeRows(rows);
  for (const edge of part.edges) straighten(edge.chain, rows);
  placeVertically(part, rows);
  routeEdges(part);
}

// Longest path from the sources. Where a cycle stops that, the earliest box left goes first and the
// edges into it go upwards.
function rankBoxes({ boxes, edges }) {
  for (const box of boxes) Object.assign(box, { rank: -1, out: [], in: [], waits: 0 });
  for (const edge of edges) {
    edge.from.out.push(edge);
    edge.to.in.push(edge);
    edge.to.waits += 1;
  }
  const sorted = [...boxes].sort((a, b) => a.order - b.order);
  const ready = sorted.filter((box) => !box.waits);
  const done = [];
  let next = 0;
  while (done.length < boxes.length) {
    if (!ready.length) {
      while (sorted[next].rank >= 0) next += 1;
      ready.push(sorted[next]);
    }
    const box = ready.shift();
    if (box.rank >= 0) continue;
    const above = box.in.map((edge) => edge.from.rank);
    box.rank = Math.max(-1, ...above) + 1;
    done.push(box);
    for (const edge of box.out) if ((edge.to.waits -= 1) === 0) ready.push(edge.to);
  }
  // A source goes down to just above what needs it.
  for (const box of done.reverse()) {
    const below = box.out.map((edge) => edge.to.rank).filter((rank) => rank > box.rank);
    if (!box.in.length && below.length) box.rank = Math.min(...below) - 1;
  }
}

function divideWideRows(boxes) {
  let shift = 0;
  for (const row of byRank(boxes)) {
    let width = 0;
    for (const box of [...row].sort((a, b) => a.order - b.order)) {
      if (width && width + box.w > MAX_ROW_WIDTH) [width, shift] = [0, shift + 1];
      width += box.w + BOX_GAP;
      box.rank += shift;
    }
  }
}

function byRank(boxes) {
  const rows = [];
  for (const box of boxes) (rows[box.rank] ??= []).push(box);
  return rows.filter(Boolean);
}

// Rows of boxes and bends; `up` and `down` are the neighbours in the rows next to it.
function makeRows({ boxes, edges }) {
  const rows = byRank(boxes);
  rows.forEach((row, rank) => row.forEach((box) => Object.assign(box, { rank, up: [], down: [] })));
  const span = (edge) => Math.abs(edge.to.rank - edge.from.rank);
  const bends = edges.reduce((sum, edge) => sum + span(edge) - 1, 0);
  for (const edge of edges) {
    const [top, bottom] =
      edge.from.rank < edge.to.rank ? [edge.from, edge.to] : [edge.to, edge.from];
    edge.chain = [top];
    for (let rank = top.rank + 1; rank < bottom.rank && bends <= MAX_BENDS; rank += 1) {
      const bend = { w: BEND_WIDTH, h: 0, rank, up: [], down: [], bend: true, order: top.order };
      rows[rank].push(bend);
      edge.chain.push(bend);
    }
    edge.chain.push(bottom);
    for (let i = 1; i < edge.chain.length; i += 1) {
      edge.chain[i - 1].down.push(edge.chain[i]);
      edge.chain[i].up.push(edge.chain[i - 1]);
    }
  }
  return rows;
}

function orderRows(rows) {
  for (const row of rows) row.sort((a, b) => a.order - b.order).forEach((box, i) => (box.pos = i));
  for (let sweep = 0; sweep < ORDER_SWEEPS; sweep += 1) {
    const [side, sequence] = sweep % 2 ? ["down", [...rows].reverse()] : ["up", rows];
    for (const row of sequence) {
      for (const box of row)
        box.wish = mean(
          box[side].map((other) => other.pos),
          box.pos,
        );
      row.sort((a, b) => a.wish - b.wish || a.pos - b.pos).forEach((box, i) => (box.pos = i));
    }
  }
}

function mean(values, otherwise) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : otherwise;
}

// `x` is a box's centre until the end.
function placeRows(rows) {
  for (const row of rows) {
    let x = 0;
    for (const box of row) {
      box.x = x + box.w / 2;
      x += box.w + BOX_GAP;
    }
    for (const box of row) box.x -= x / 2;
  }
  for (let sweep = 0; sweep < PLACE_SWEEPS; sweep += 1) {
    const [side, sequence] = sweep % 2 ? ["down", [...rows].reverse()] : ["up", rows];
    const last = sweep >= PLACE_SWEEPS / 2;
    for (const row of sequence) {
      for (const box of row) {
        const near = last ? [...box.up, ...box.down] : box[side];
        box.wish = mean(
          near.map((other) => other.x),
          box.x,
        );
        // Long edges are to be straight, so a bend gives way to nothing but other bends.
        box.pull = box.bend ? 12 : 1 + near.length;
      }
      spread(row);
    }
  }
}

// The places nearest to the wished ones that keep order and gaps: isotonic regression, by pooling
// neighbours that are in each other's way.
function spread(row) {
  const pools = [];
  let offset = 0;
  row.forEach((box, i) => {
    if (i) offset += distance(row[i - 1], box);
    box.offset = offset;
    let pool = { sum: (box.wish - offset) * box.pull, pull: box.pull, size: 1 };
    while (pools.length && average(pools[pools.length - 1]) > average(pool)) {
      const before = pools.pop();
      pool = {
        sum: before.sum + pool.sum,
        pull: before.pull + pool.pull,
        size: before.size + pool.size,
      };
    }
    pools.push(pool);
  });
  let next = 0;
  for (const pool of pools) {
    for (const box of row.slice(next, next + pool.size)) box.x = average(pool) + box.offset;
    next += pool.size;
  }
}

const average = (pool) => pool.sum / pool.pull;

// How far apart the centres of neighbours must be.
function distance(left, right) {
  return (left.w + right.w) / 2 + (left.bend || right.bend ? BEND_GAP : BOX_GAP);
}

// Puts the bends of an edge on as few verticals as the boxes next to them allow.
function straighten(chain, rows) {
  let x = chain[0].x;
  let low = -Infinity;
  let high = Infinity;
  let aligned = [];
  const align = () => {
    x = Math.min(high, Math.max(low, x));
    for (const bend of aligned) bend.x = x;
  };
  for (const bend of chain.slice(1, -1)) {
    const row = rows[bend.rank];
    const [left, right] = [row[bend.pos - 1], row[bend.pos + 1]];
    const from = left ? left.x + distance(left, bend) : -Infinity;
    const to = right ? right.x - distance(bend, right) : Infinity;
    if (Math.max(low, from) > Math.min(high, to)) {
      align();
      [low, high, aligned] = [from, to, []];
    } else {
      [low, high] = [Math.max(low, from), Math.min(high, to)];
    }
    aligned.push(bend);
  }
  align();
}

function placeVertically(part, rows) {
  let y = 0;
  for (const row of rows) {
    const high = Math.max(...row.map((box) => box.h));
    for (const box of row) {
      Object.assign(box, { y: y + (high - box.h) / 2, rowTop: y, rowBottom: y + high });
    }
    y += high + ROW_GAP;
  }
  const all = rows.flat();
  const left = all.reduce((min, box) => Math.min(min, box.x - box.w / 2), Infinity);
  for (const box of all) box.x -= left + box.w / 2;
  part.w = all.reduce((max, box) => Math.max(max, box.x + box.w), 0);
  part.h = y - ROW_GAP;
}

function routeEdges({ edges, boxes }) {
  const centre = (box) => box.x + box.w / 2;
  for (const box of boxes) {
    box.bottomPorts = sortedEnds(box, (edge) => [edge.chain[0], edge.chain[1]], centre);
    box.topPorts = sortedEnds(box, (edge) => [edge.chain.at(-1), edge.chain.at(-2)], centre);
  }
  for (const edge of edges) {
    const [top, bottom] = [edge.chain[0], edge.chain.at(-1)];
    const start = port(top, top.bottomPorts, edge);
    const end = port(bottom, bottom.topPorts, edge);
    const points = [
      [start, top.y + top.h],
      [start, top.rowBottom],
    ];
    for (const bend of edge.chain.slice(1, -1)) {
      points.push([centre(bend), bend.rowTop], [centre(bend), bend.rowBottom]);
    }
    points.push([end, bottom.rowTop], [end, bottom.y]);
    // A piece without length has no direction, which the arrow at its end would need.
    const distinct = points.filter(
      ([px, py], i) => !i || px !== points[i - 1][0] || py !== points[i - 1][1],
    );
    edge.points = top === edge.from ? distinct : distinct.reverse();
    edge.upward = top !== edge.from;
  }
}

function sortedEnds(box, ends, centre) {
  return [...box.in, ...box.out]
    .filter((edge) => ends(edge)[0] === box)
    .sort((a, b) => centre(ends(a)[1]) - centre(ends(b)[1]));
}

function port(box, ports, edge) {
  const step = Math.min(14, (box.w * 0.7) / ports.length);
  return box.x + box.w / 2 + (ports.indexOf(edge) - (ports.length - 1) / 2) * step;
}
