// The drawing: open groups hold their own layered layout, closed ones are one box.

const SVG = "http:" + "//www.w3.org/2000/svg"; // a name, not an address: nothing is loaded from it
const HEADER = 26;
const PADDING = 14;
const MAX_LABEL = 30;
const MIN_SCALE = 0.02;
const MAX_SCALE = 3;
// A node that feeds more siblings than this, or takes from more, would tie everything together: its
// edges are drawn only while it is selected.
const MANY_EDGES = 12;
const MAX_TRACED = 300;

function element(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  return dress(made, attributes, text);
}

function svgElement(name, attributes = {}, text = null) {
  return dress(document.createElementNS(SVG, name), attributes, text);
}

// Text goes in as text, never as markup: the names are whatever the graph's author wrote.
function dress(made, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function shorten(text, most = MAX_LABEL) {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) * 0.6);
  return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
}

const measureText = (() => {
  const context = document.createElement("canvas").getContext("2d");
  const widths = new Map();
  return (text, font) => {
    const key = pairKey(font, text);
    if (!widths.has(key)) {
      context.font = font;
      widths.set(key, context.measureText(text).width);
    }
    return widths.get(key);
  };
})();
const LABEL_FONT = "600 12px system-ui, sans-serif";
const SMALL_FONT = "11px system-ui, sans-serif";

class GraphView {
  constructor(model, canvas, onSelect) {
    Object.assign(this, { model, canvas, onSelect, selected: null, scale: 1, x: 0, y: 0 });
    this.layer = svgElement("g");
    canvas.append(arrowHead(), this.layer);
    this.listen();
  }

  // ---- sizes and layout ----

  subtitle(item) {
    if (item.kind === "node") return `${item.node.op} · ${shortDtype(item.node.dtype)}`;
    const low = item.counts.low + item.counts.given;
    const part = item.size ? ` · ${Math.round((100 * low) / item.size)}% low` : "";
    return `${plural(item.size, "node")}${part}`;
  }

  label(item) {
    const mark = { function: "ƒ ", node: "" }[item.kind] ?? "";
    return mark + shorten(item.label);
  }

  measure(item) {
    const label = measureText(this.label(item), LABEL_FONT);
    const extra = item.kind === "node" ? 20 : 40;
    const small = measureText(shorten(this.subtitle(item)), SMALL_FONT);
    const width = Math.max(label + extra, small + 20, 76);
    if (item.kind === "node" || !item.open) {
      const height = item.kind === "node" ? 38 : 48;
      return { item, w: width, h: height, order: item.order };
    }
    const inner = this.layOut(item);
    return {
      item, w: Math.max(inner.w + 2 * PADDING, label + small + 130), h: inner.h + HEADER + 2 * PADDING, inner,
      order: item.order,
    };
  }

  // An open group's boxes and edges; kept until something in it opens or closes.
  layOut(item) {
    if (item.inner) return item.inner;
    const boxes = item.children.map((child) => this.measure(child));
    const boxOf = new Map(boxes.map((box) => [box.item, box]));
    const hidden = hubs(item);
    const edges = [];
    const pills = new Map();
    for (const link of item.links.values()) {
      if (hidden.has(link.from) || hidden.has(link.to)) continue;
      const [from, to] = [boxOf.get(link.from), boxOf.get(link.to)];
      if (link.casts.size) edges.push(...this.throughPill(link, from, to, pills));
      else edges.push({ from, to, link });
    }
    boxes.push(...pills.values());
    for (const box of boxes) if (hidden.has(box.item)) box.hub = hidden.get(box.item);
    item.inner = { boxes, edges, ...layered(boxes, edges) };
    return item.inner;
  }

  // A Cast is a node of the rewritten graph, so it gets a place of its own on its edge; edges that
  // share their Casts share it.
  throughPill(link, from, to, pills) {
    const casts = [...link.casts];
    const key = pairKey(link.from.id, casts.map((cast) => cast.name));
    const made = !pills.has(key);
    if (made) pills.set(key, this.makePill(casts, from));
    const pill = pills.get(key);
    pill.pill.links.push(link);
    const edges = [{ from: pill, to, link }];
    return made ? [{ from, to: pill, link }, ...edges] : edges;
  }

  makePill(casts, from) {
    const targets = new Set(casts.map((cast) => cast.to));
    const many = casts.length > 1 ? `${count(casts.length)} Casts ` : "";
    const dtype = targets.size === 1 ? `→ ${shortDtype(casts[0].to)} ` : "";
    const text = `${many}${dtype}· ${castBytes(casts)}`;
    const color = targets.size > 1 ? "mixed" : casts[0].to === this.model.plan.dtype ? "low" : "float32";
    return {
      pill: { text, color, links: [], casts }, w: measureText(text, SMALL_FONT) + 16, h: 18, order: from.order + 0.5,
    };
  }

  forgetLayout(item) {
    for (const each of pathTo(item)) each.inner = null;
  }

  // ---- drawing ----

  draw() {
    const root = this.layOut(this.model.root);
    this.size = { w: root.w, h: root.h };
    this.places = new Map();
    this.layer.replaceChildren();
    this.drawInner(root, 0, 0, this.layer);
    this.overlay = svgElement("g", { class: "overlay" });
    this.layer.append(this.overlay);
    this.markSelected();
    this.transform();
  }

  drawInner(inner, x, y, parent) {
    for (const edge of inner.edges) {
      if (edge.points) parent.append(this.drawEdge(edge, x, y));
    }
    for (const box of inner.boxes) {
      if (box.pill) parent.append(this.drawPill(box, x, y));
      else this.drawItem(box, x + box.x, y + box.y, parent);
    }
  }

  drawEdge(edge, x, y) {
    const ends = edge.to.pill ? {} : { "marker-end": "url(#arrow)" };
    const path = svgElement("path", {
      class: edge.upward ? "edge upward" : "edge", d: curve(edge.points, x, y), ...ends,
    });
    path.style.strokeWidth = 1 + Math.min(2, Math.log10(Math.max(1, edge.link.edges)));
    return path;
  }

  drawPill(box, x, y) {
    const { pill } = box;
    const made = svgElement("g", { class: `pill ${pill.color}`, transform: `translate(${x + box.x},${y + box.y})` });
    made.append(
      svgElement("title", {}, pillTitle(pill)),
      svgElement("rect", { width: box.w, height: box.h, rx: box.h / 2 }),
      svgElement("text", { x: box.w / 2, y: box.h / 2 + 4, class: "small" }, pill.text),
    );
    made.addEventListener("click", () => this.onSelect({ pill }));
    return made;
  }

  drawItem(box, x, y, parent) {
    const { item } = box;
    this.places.set(item, { x, y, w: box.w, h: box.h });
    const open = item.open && item.kind !== "node";
    const made = svgElement("g", {
      class: itemClass(item, open), transform: `translate(${x},${y})`, tabindex: 0, role: "button",
      "aria-label": `${item.title}, ${this.subtitle(item)}`, "data-item": item.id,
    });
    if (item.kind !== "node") made.setAttribute("aria-expanded", open);
    made.append(svgElement("title", {}, item.title), svgElement("rect", { class: "box", width: box.w, height: box.h, rx: 7 }));
    if (open) this.dressOpen(made, item, box);
    else this.dressClosed(made, item, box);
    parent.append(made);
    if (open) this.drawInner(box.inner, x + (box.w - box.inner.w) / 2, y + HEADER + PADDING, parent);
  }

  dressClosed(made, item, box) {
    const sign = item.kind === "node" ? "" : "+ ";
    made.append(
      svgElement("text", { x: box.w / 2, y: 16, class: "label" }, sign + this.label(item)),
      svgElement("text", { x: box.w / 2, y: 31, class: "small" }, shorten(this.subtitle(item))),
    );
    if (item.kind !== "node") made.append(shareBar(item, 8, 38, box.w - 16));
    if (box.hub) {
      made.append(svgElement("text", { x: box.w / 2, y: box.h + 12, class: "small hub" }, box.hub));
    }
  }

  dressOpen(made, item, box) {
    const close = svgElement("g", { class: "close", "data-close": item.id });
    close.append(
      svgElement("title", {}, "Close this group"),
      svgElement("rect", { width: 22, height: 18, x: 4, y: 4, rx: 4 }),
      svgElement("text", { x: 15, y: 17, class: "label" }, "−"),
    );
    const label = svgElement("text", { x: 32, y: 17, class: "label start" }, this.label(item));
    label.append(svgElement("tspan", { class: "small", dx: 8 }, shorten(this.subtitle(item))));
    made.append(close, label, shareBar(item, box.w - 58, 10, 50));
  }

  // ---- selection ----

  select(item) {
    this.selected = item;
    this.markSelected();
  }

  markSelected() {
    this.layer.querySelectorAll(".selected").forEach((each) => each.classList.remove("selected"));
    this.overlay?.replaceChildren();
    if (!this.selected || !this.overlay) return;
    const item = shown(this.selected);
    this.layer.querySelector(`[data-item="${item.id}"]`)?.classList.add("selected");
    this.trace(item);
  }

  // The real edges of what is selected, across the borders of groups.
  trace(item) {
    const inside = new Set(nodesIn(item));
    const ends = { takes: new Set(), feeds: new Set() };
    for (const node of inside) {
      for (const side of ["takes", "feeds"]) {
        for (const other of node[side]) if (!inside.has(other)) ends[side].add(shown(other.item));
      }
    }
    const here = this.places.get(item);
    for (const [side, others] of Object.entries(ends)) {
      for (const other of [...others].slice(0, MAX_TRACED)) {
        const there = this.places.get(other);
        const [from, to] = side === "takes" ? [there, here] : [here, there];
        this.overlay.append(svgElement("path", { class: `trace ${side}`, d: straightCurve(from, to), "marker-end": "url(#arrow)" }));
      }
    }
  }

  open(item) {
    for (const each of pathTo(item)) {
      if (each.kind !== "node") each.open = true;
    }
    this.forgetLayout(item);
  }

  close(item) {
    item.open = false;
    this.forgetLayout(item);
  }

  // Opens or closes a group where it is on the screen.
  toggle(item, open) {
    const before = this.places.get(item);
    if (open) this.open(item);
    else this.close(item);
    this.draw();
    const after = this.places.get(item);
    if (before && after) this.moveBy((before.x - after.x) * this.scale, (before.y - after.y) * this.scale);
    if (open) this.bringIntoView(item, 0.55);
  }

  // ---- moving ----

  transform() {
    this.layer.setAttribute("transform", `translate(${this.x},${this.y}) scale(${this.scale})`);
  }

  moveBy(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.transform();
  }

  viewSize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    return { w: width || 900, h: height || 500 };
  }

  zoom(factor, cx = this.viewSize().w / 2, cy = this.viewSize().h / 2) {
    const scale = Math.min(MAX_SCALE, Math.max(MIN_SCALE, this.scale * factor));
    this.x = cx - ((cx - this.x) * scale) / this.scale;
    this.y = cy - ((cy - this.y) * scale) / this.scale;
    this.scale = scale;
    this.transform();
  }

  // The whole of a place where that stays readable, else its top.
  frame(place, least, most = 1.15) {
    const view = this.viewSize();
    const whole = Math.min((view.w - 40) / place.w, (view.h - 40) / place.h);
    this.scale = Math.min(most, Math.max(least, whole));
    this.x = (view.w - place.w * this.scale) / 2 - place.x * this.scale;
    const free = view.h - place.h * this.scale;
    this.y = (free > 40 ? free / 2 : 20) - place.y * this.scale;
    this.transform();
  }

  fit(least = MIN_SCALE) {
    this.frame({ x: 0, y: 0, ...this.size }, least);
  }

  bringIntoView(item, least = 0.3) {
    const place = this.places.get(shown(item));
    const view = this.viewSize();
    const left = place.x * this.scale + this.x;
    const top = place.y * this.scale + this.y;
    const fits = left >= 0 && top >= 0 && left + place.w * this.scale <= view.w && top + place.h * this.scale <= view.h;
    if (!fits) this.frame(place, least, Math.max(this.scale, least));
  }

  listen() {
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onDrag(event));
    this.canvas.addEventListener("click", (event) => this.onClick(event));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onWheel(event) {
    event.preventDefault();
    const { left, top } = this.canvas.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - left, event.clientY - top);
  }

  onDrag(start) {
    const from = { x: this.x, y: this.y };
    const move = (event) => {
      const [dx, dy] = [event.clientX - start.clientX, event.clientY - start.clientY];
      // Few pixels are a click with an unsteady hand.
      if (!this.dragged && Math.hypot(dx, dy) < 4) return;
      this.dragged = true;
      [this.x, this.y] = [from.x + dx, from.y + dy];
      this.transform();
    };
    this.dragged = false;
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", () => window.removeEventListener("pointermove", move), { once: true });
  }

  onClick(event) {
    if (this.dragged) return;
    const close = event.target.closest("[data-close]");
    if (close) this.toggle(this.model.items[close.dataset.close], false);
    else this.activate(event.target.closest("[data-item]"));
  }

  activate(box) {
    if (!box) return;
    const item = this.model.items[box.dataset.item];
    if (item.kind !== "node" && !item.open) this.toggle(item, true);
    this.onSelect({ item });
  }

  onKey(event) {
    const step = 60;
    const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    const box = event.target.closest("[data-item]");
    if (moves[event.key]) this.moveBy(...moves[event.key]);
    else if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 1.25 : 0.8);
    else if (event.key === "0") this.fit();
    else if (box && (event.key === "Enter" || event.key === " ")) this.onEnter(box);
    else return;
    event.preventDefault();
  }

  onEnter(box) {
    const item = this.model.items[box.dataset.item];
    if (item.kind !== "node" && item.open) this.toggle(item, false);
    else this.activate(box);
    this.layer.querySelector(`[data-item="${item.id}"]`)?.focus();
  }
}

// Items whose edges are left out, with what to write next to them.
function hubs(group) {
  const found = new Map();
  const degrees = new Map(group.children.map((child) => [child, { into: 0, from: 0 }]));
  for (const { from, to } of group.links.values()) {
    degrees.get(from).from += 1;
    degrees.get(to).into += 1;
  }
  for (const [item, { into, from }] of degrees) {
    if (item.kind !== "node") continue;
    if (!into && from > MANY_EDGES) found.set(item, `feeds ${from}`);
    if (!from && into > MANY_EDGES) found.set(item, `takes ${into}`);
  }
  return found;
}

function itemClass(item, open) {
  if (item.kind === "node") return `item node ${item.node.color}`;
  return `item group ${item.kind} ${open ? "opened" : "closed"}`;
}

function pillTitle({ casts }) {
  const lines = casts.slice(0, 12).map((cast) => `${cast.tensor}: ${cast.from} → ${cast.to}, ${bytesText(cast.bytes)}`);
  if (casts.length > 12) lines.push(`and ${casts.length - 12} more`);
  return lines.join("\n");
}

// Which part of a group has which colour.
function shareBar(item, x, y, width) {
  const bar = svgElement("g", { class: "share" });
  let left = x;
  for (const [color, number] of Object.entries(item.counts)) {
    if (!number) continue;
    const part = (width * number) / item.size;
    bar.append(svgElement("rect", { class: color, x: left, y, width: part, height: 5 }));
    left += part;
  }
  return bar;
}

function arrowHead() {
  const marker = svgElement("marker", {
    id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
    markerUnits: "userSpaceOnUse", orient: "auto",
  });
  marker.append(svgElement("path", { d: "M0,0.8 L8,4 L0,7.2 z", class: "arrow-head" }));
  const defs = svgElement("defs");
  defs.append(marker);
  return defs;
}

// Straight where it passes a row, bent between rows.
function curve(points, dx, dy) {
  const at = ([x, y]) => `${(x + dx).toFixed(1)},${(y + dy).toFixed(1)}`;
  let d = `M${at(points[0])}`;
  for (let i = 1; i < points.length; i += 1) {
    const [from, to] = [points[i - 1], points[i]];
    const middle = (from[1] + to[1]) / 2;
    d += from[0] === to[0] ? ` L${at(to)}` : ` C${at([from[0], middle])} ${at([to[0], middle])} ${at(to)}`;
  }
  return d;
}

function straightCurve(from, to) {
  const start = [from.x + from.w / 2, from.y + from.h];
  const end = [to.x + to.w / 2, to.y];
  const bow = Math.max(24, Math.abs(end[1] - start[1]) / 2);
  return `M${start} C${start[0]},${start[1] + bow} ${end[0]},${end[1] - bow} ${end}`;
}
