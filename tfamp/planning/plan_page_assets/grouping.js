// Dividing groups with many children, so that what is open stays small enough to look at.

// A group with more children than this is divided further.
const MANY_CHILDREN = 24;
const MIN_SERIES = 8;
const MIN_RUN = 3;
// Where names tell nothing, this many neighbours in graph order are a group.
const TOO_MANY_CHILDREN = 300;
const CHUNK = 100;
// Where a group is divided by what its children's names begin with.
const NAME_PARTS = /[_.-]/;
function divide(model, item) {
  sortChildren(item);
  if (item.children.length <= MANY_CHILDREN) return;
  const after = successors(item);
  gatherSeries(model, item, after);
  if (item.children.length > MANY_CHILDREN) gatherRuns(model, item, 1, after);
  if (item.children.length > TOO_MANY_CHILDREN) gatherChunks(model, item);
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
      const made = moveIntoGroup(
        model,
        item,
        members,
        "series",
        `${stem(members[0])} ×${members.length}`,
      );
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
  for (const child of children)
    for (const next of after.get(child)) waits.set(next, waits.get(next) + 1);
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
  after.set(
    made,
    new Set(members.flatMap((child) => [...after.get(child)]).filter((child) => !own.has(child))),
  );
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
  const pending = members
    .flatMap((child) => [...after.get(child)])
    .filter((child) => !own.has(child));
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

function gatherChunks(model, item) {
  const children = item.children.filter((child) => child.kind !== "function");
  for (let start = 0; start + 1 < children.length; start += CHUNK) {
    const members = children.slice(start, start + CHUNK);
    const label = `${shorten(members[0].label, 14)} to ${shorten(members.at(-1).label, 14)}`;
    moveIntoGroup(model, item, members, "run", label);
  }
}

function moveIntoGroup(model, item, members, kind, label) {
  const group = newItem(model, kind, label, item);
  const prefix =
    item.kind === "root" ? "" : `${item.title}${item.kind === "function" ? ": " : "/"}`;
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
