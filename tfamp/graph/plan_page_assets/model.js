// The plan as a tree of items: nodes as leaves, name scopes and functions as groups.

// A group with more children than this is divided further.
const MANY_CHILDREN = 24;
const MIN_SERIES = 8;
const MIN_RUN = 3;
// Where a group is divided by what its children's names begin with.
const NAME_PARTS = /[_.-]/;
const SHORT_DTYPES = { float32: "f32", float16: "f16", bfloat16: "bf16" };
const COLLATOR = new Intl.Collator("en", { numeric: true });

const shortDtype = (dtype) => SHORT_DTYPES[dtype] ?? dtype;
const count = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const place = (scope, name) => (scope ? `${scope}: ${name}` : name);
// JSON text of two strings: unlike joined by a sign, no two pairs give the same.
const pairKey = (scope, name) => JSON.stringify([scope, name]);

function bytesText(bytes) {
  if (bytes === null) return "size unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function castBytes(casts) {
  const known = casts.filter((cast) => cast.bytes !== null);
  const unknown = casts.length - known.length;
  if (!known.length) return bytesText(null);
  const sum = bytesText(known.reduce((total, cast) => total + cast.bytes, 0));
  return unknown ? `${sum} + ${unknown} unknown` : sum;
}

function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} µs`;
}

// What a node is coloured by.
function colorClass(node, lowDtype) {
  if (node.rule === "as given") return "given";
  return node.dtype === lowDtype ? "low" : "float32";
}

function buildModel(plan) {
  const model = {
    plan,
    nodes: plan.nodes.map((node, order) => ({
      ...node, order, color: colorClass(node, plan.dtype), feeds: [], takes: [], castsIn: [], castsOut: [],
    })),
    outside: [],
    casts: plan.casts,
    byName: new Map(),
    groups: new Map(), // by what the address calls them
    leaves: new Map(),
    items: [],
  };
  for (const node of model.nodes) model.byName.set(pairKey(node.scope, node.name), node);
  connect(model);
  connectCasts(model);
  model.root = buildTree(model);
  linkSiblings(model);
  return model;
}

function connect(model) {
  for (const node of model.nodes) {
    for (const name of node.inputs) {
      const producer = model.byName.get(pairKey(node.scope, name));
      if (!producer || producer === node) continue;
      node.takes.push(producer);
      producer.feeds.push(node);
    }
  }
}

function connectCasts(model) {
  for (const cast of model.casts) {
    const producer = nodeOrBoundary(model, cast.scope, cast.producer, "argument");
    producer.castsOut.push(cast);
    cast.ends = [];
    for (const name of new Set(cast.consumers.map(([consumer]) => consumer))) {
      const consumer = nodeOrBoundary(model, cast.scope, name, "result");
      consumer.castsIn.push(cast);
      cast.ends.push([producer, consumer]);
    }
  }
}

// A function's arguments and results are not nodes of the plan, but a Cast may be next to one.
function nodeOrBoundary(model, scope, name, role) {
  const key = pairKey(scope, name);
  if (!model.byName.has(key)) {
    const node = {
      scope, name: name.replace(/^<result>/, ""), op: role, dtype: "float32", color: "outside", rule: "", cost: null, inputs: [],
      reason: `It is the function's ${role}, or a node that does not compute with floats.`,
      order: role === "argument" ? -1 : model.nodes.length, feeds: [], takes: [], castsIn: [], castsOut: [],
    };
    model.byName.set(key, node);
    model.outside.push(node);
  }
  return model.byName.get(key);
}

function newItem(model, kind, label, parent) {
  const item = {
    id: model.items.length, kind, label, parent, children: [], open: false, order: Infinity, size: 0,
    counts: { low: 0, float32: 0, given: 0 }, links: new Map(), title: label,
  };
  model.items.push(item);
  return item;
}

function buildTree(model) {
  const root = newItem(model, "root", "", null);
  const scopes = new Map([["", root]]);
  for (const node of [...model.nodes, ...model.outside]) {
    if (!scopes.has(node.scope)) {
      const item = newItem(model, "function", node.scope, root);
      item.title = `function ${node.scope}`;
      root.children.push(item);
      scopes.set(node.scope, item);
      model.groups.set(node.scope, item).set(item.title, item);
    }
    addNode(model, scopes.get(node.scope), node);
  }
  root.open = true;
  finish(model, root);
  return root;
}

function addNode(model, scopeItem, node) {
  const parts = node.name.split("/");
  const label = parts.pop();
  let parent = scopeItem;
  let path = "";
  for (const part of parts) {
    path = path ? `${path}/${part}` : part;
    const key = place(node.scope, path);
    if (!model.groups.has(key)) {
      const group = newItem(model, "group", part, parent);
      group.title = key;
      parent.children.push(group);
      model.groups.set(key, group);
    }
    parent = model.groups.get(key);
  }
  const leaf = newItem(model, "node", label, parent);
  leaf.node = node;
  leaf.title = place(node.scope, node.name);
  leaf.order = node.order;
  leaf.size = node.color === "outside" ? 0 : 1;
  if (leaf.size) leaf.counts[node.color] = 1;
  node.item = leaf;
  model.leaves.set(leaf.title, leaf);
  parent.children.push(leaf);
}

// Bottom up: totals, groups of one child replaced by the child, large groups divided.
function finish(model, item) {
  if (item.kind === "node") return item;
  item.children = item.children.map((child) => finish(model, child));
  if (item.kind === "group" && item.children.length === 1) return replaceByChild(model, item);
  divide(model, item);
  addUp(item);
  return item;
}

function addUp(item) {
  item.size = 0;
  item.counts = { low: 0, float32: 0, given: 0 };
  for (const child of item.children) {
    child.parent = item;
    item.order = Math.min(item.order, child.order);
    item.size += child.size;
    for (const color of Object.keys(item.counts)) item.counts[color] += child.counts[color];
  }
  sortChildren(item);
}

// In graph order, functions behind the graph they are called from.
function sortChildren(item) {
  const late = (child) => Number(child.kind === "function");
  item.children.sort((a, b) => late(a) - late(b) || a.order - b.order || a.id - b.id);
}

function replaceByChild(model, item) {
  const [child] = item.children;
  child.label = `${item.label}/${child.label}`;
  if (child.kind === "node") model.groups.delete(item.title);
  else model.groups.set(item.title, child);
  return child;
}

function divide(model, item) {
  sortChildren(item);
  if (item.children.length <= MANY_CHILDREN) return;
  const after = successors(item);
  gatherSeries(model, item, after);
  if (item.children.length > MANY_CHILDREN) gatherRuns(model, item, 1, after);
}

// The children that each child's tensors go to.
function successors(item) {
  const owner = new Map();
  for (const child of item.children) for (const node of nodesIn(child)) owner.set(node, child);
  const after = new Map(item.children.map((child) => [child, new Set()]));
  for (const [node, child] of owner) {
    for (const other of node.feeds) {
      if (owner.has(other) && owner.get(other) !== child) after.get(child).add(owner.get(other));
    }
  }
  return after;
}

// What only a number tells apart, such as the updates of all variables.
function gatherSeries(model, item, after) {
  const stem = (child) => child.label.replace(/_\d+(?=\/|$)/g, "");
  const series = new Map();
  for (const child of item.children) {
    const key = JSON.stringify([child.kind, child.node?.op, child.size, stem(child)]);
    if (!series.has(key)) series.set(key, []);
    series.get(key).push(child);
  }
  for (const alike of series.values()) {
    if (alike.length < MIN_SERIES) continue;
    for (const members of byDepth(item.children, alike, after)) {
      if (members.length < MIN_SERIES) continue;
      const made = moveIntoGroup(model, item, members, "series", `${stem(members[0])} ×${members.length}`);
      mergeSuccessors(after, members, made);
    }
  }
}

// Divides members so that no way leads from one of a part through others back to the part: by how
// often a way to a member has left the members before.
function byDepth(children, members, after) {
  const own = new Set(members);
  const depths = new Map(children.map((child) => [child, 0]));
  for (const child of topologicalOrder(children, after)) {
    for (const next of after.get(child)) {
      const leaves = own.has(child) && !own.has(next);
      depths.set(next, Math.max(depths.get(next), depths.get(child) + Number(leaves)));
    }
  }
  const parts = [];
  for (const child of members) (parts[depths.get(child)] ??= []).push(child);
  return parts.filter(Boolean);
}

// Producers before consumers; where a cycle stops that, the first child left goes next.
function topologicalOrder(children, after) {
  const waits = new Map(children.map((child) => [child, 0]));
  for (const child of children) for (const next of after.get(child)) waits.set(next, waits.get(next) + 1);
  const sorted = [];
  const seen = new Set();
  const visit = (start) => {
    const ready = [start];
    while (ready.length) {
      const child = ready.pop();
      if (seen.has(child)) continue;
      seen.add(child);
      sorted.push(child);
      for (const next of after.get(child)) {
        waits.set(next, waits.get(next) - 1);
        if (!waits.get(next)) ready.push(next);
      }
    }
  };
  for (const child of children) if (!waits.get(child)) visit(child);
  for (const child of children) visit(child);
  return sorted;
}

function mergeSuccessors(after, members, made) {
  const own = new Set(members);
  after.set(made, new Set(members.flatMap((child) => [...after.get(child)]).filter((child) => !own.has(child))));
  for (const child of members) after.delete(child);
  for (const targets of after.values()) {
    if (members.filter((child) => targets.delete(child)).length) targets.add(made);
  }
}

// Whether a way leads from some of these children through others back to some of them. As one group
// they would then be before and behind what is on the way, which no layered layout shows well.
function comesBack(members, after) {
  const own = new Set(members);
  const seen = new Set();
  const pending = members.flatMap((child) => [...after.get(child)]).filter((child) => !own.has(child));
  while (pending.length) {
    const child = pending.pop();
    if (seen.has(child)) continue;
    seen.add(child);
    for (const next of after.get(child)) {
      if (own.has(next)) return true;
      pending.push(next);
    }
  }
  return false;
}

// A group makes nothing worse where each member alone is before and behind the same.
function belongTogether(members, after) {
  return !comesBack(members, after) || comesBack(members.slice(0, 1), after);
}

// Neighbours in graph order whose names begin alike, such as the layers of a block.
function gatherRuns(model, item, depth, after) {
  const runs = [];
  let last = null;
  for (const child of item.children) {
    const parts = child.kind === "series" ? [] : child.label.split(NAME_PARTS);
    const start = parts.length > depth ? parts.slice(0, depth).join("_") : null;
    if (start === null || start !== last) runs.push({ start, members: [] });
    runs[runs.length - 1].members.push(child);
    last = start;
  }
  if (runs.length === 1) {
    if (runs[0].start !== null) gatherRuns(model, item, depth + 1, after);
    return;
  }
  for (const { start, members } of runs) {
    if (members.length < MIN_RUN || start === null || !belongTogether(members, after)) continue;
    const run = moveIntoGroup(model, item, members, "run", `${start}_…`);
    if (members.length > MANY_CHILDREN) gatherRuns(model, run, depth + 1, successors(run));
    mergeSuccessors(after, members, run);
  }
}

function moveIntoGroup(model, item, members, kind, label) {
  const group = newItem(model, kind, label, item);
  const prefix = item.kind === "root" ? "" : `${item.title}${item.kind === "function" ? ": " : "/"}`;
  group.title = prefix + label;
  for (let i = 2; model.groups.has(group.title); i += 1) group.title = `${prefix}${label} (${i})`;
  group.children = members;
  addUp(group);
  const moved = new Set(members);
  item.children = item.children.filter((child) => !moved.has(child));
  item.children.push(group);
  sortChildren(item);
  model.groups.set(group.title, group);
  return group;
}

// Every edge is drawn once: between the two siblings that its ends are in.
function linkSiblings(model) {
  for (const node of model.nodes) {
    for (const producer of node.takes) siblingLink(producer.item, node.item).edges += 1;
  }
  for (const cast of model.casts) {
    for (const [producer, consumer] of cast.ends) {
      if (producer !== consumer) siblingLink(producer.item, consumer.item).casts.add(cast);
    }
  }
}

function siblingLink(from, to) {
  const above = pathTo(from);
  const below = pathTo(to);
  let depth = 0;
  while (above[depth] === below[depth]) depth += 1;
  const { links } = above[depth - 1];
  const key = `${above[depth].id},${below[depth].id}`;
  if (!links.has(key)) links.set(key, { from: above[depth], to: below[depth], edges: 0, casts: new Set() });
  return links.get(key);
}

// From the root to the item itself.
function pathTo(item) {
  const path = [];
  for (let each = item; each; each = each.parent) path.push(each);
  return path.reverse();
}

function nodesIn(item) {
  if (item.kind === "node") return [item.node];
  return item.children.flatMap(nodesIn);
}

// What is drawn of an item: itself, or the outermost closed group it is in.
function shown(item) {
  return pathTo(item).find((each) => !each.open) ?? item;
}
