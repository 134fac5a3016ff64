// The plan as a tree of items: nodes as leaves, name scopes and functions as groups.

// What a node is coloured by.
function colorClass(node, lowDtype) {
  if (node.rule === "as given") return "given";
  return node.dtype === lowDtype ? "low" : "float32";
}

function buildModel(plan) {
  const model = {
    plan,
    nodes: plan.nodes.map((node, order) => ({
      ...node,
      order,
      color: colorClass(node, plan.dtype),
      feeds: [],
      takes: [],
      castsIn: [],
      castsOut: [],
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
      scope,
      name: name.replace(/^<result>/, ""),
      op: role,
      dtype: "float32",
      color: "outside",
      rule: "",
      cost: null,
      inputs: [],
      reason: `It is the function's ${role}, or a node that does not compute with floats.`,
      order: role === "argument" ? -1 : model.nodes.length,
      feeds: [],
      takes: [],
      castsIn: [],
      castsOut: [],
    };
    model.byName.set(key, node);
    model.outside.push(node);
  }
  return model.byName.get(key);
}

function newItem(model, kind, label, parent) {
  const item = {
    id: model.items.length,
    kind,
    label,
    parent,
    children: [],
    open: false,
    order: Infinity,
    size: 0,
    counts: { low: 0, float32: 0, given: 0 },
    links: new Map(),
    title: label,
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

const linkKey = (from, to) => `${from.id},${to.id}`;

function siblingLink(from, to) {
  const above = pathTo(from);
  const below = pathTo(to);
  let depth = 0;
  while (above[depth] === below[depth]) depth += 1;
  const { links } = above[depth - 1];
  const key = linkKey(above[depth], below[depth]);
  if (!links.has(key))
    links.set(key, { from: above[depth], to: below[depth], edges: 0, casts: new Set() });
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
