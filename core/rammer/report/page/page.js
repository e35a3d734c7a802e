// The page: sections with a panel for each shown device.
const working = data.devices.filter(d => d.programs), open = [];
let shown = working.slice(0, 1);

const totals = device => ({
  predicted: sum(device.programs, p => p.predicted * p.repeat) * 1e9,
  tasks: sum(device.programs, p => p.tasks), operators: sum(device.programs, p => p.operators.length),
  arena: Math.max(0, ...device.programs.map(p => p.arena)), constants: sum(device.programs, p => p.constants),
  flops: sum(device.programs, p => p.repeat * sum(p.operators, o => o.flops)),
});

function card(device) {
  const title = el('div', {}, el('h3', {}, el('span', { class: 'name' }, device.name), ' ', device.kind ? el('span', { class: 'tag' }, device.kind) : null));
  if (!device.programs) return el('div', { class: 'card' }, title, el('p', { class: 'missing' }, `Not available: ${device.why}`));
  device.programs.forEach(prepareProgram);
  const t = totals(device), row = (name, value) => [el('dt', {}, name), el('dd', {}, value)];
  const lead = device.measured ? duration(device.measured * 1e9) : duration(t.predicted), busy = sum(device.programs, p => p.busy) / (sum(device.programs, p => p.end * p.veus) || 1);
  return el('div', { class: 'card' }, title, el('p', { class: 'small quiet name' }, device.hardware),
    el('div', { class: 'big' }, lead), el('div', { class: 'small quiet' }, device.measured ? `${device.simulated ? 'simulated' : 'measured'} on the device; predicted ${duration(t.predicted)}` : 'predicted for one run'),
    el('dl', {},
      row('schedule', `${plural(t.tasks, 'task')} on ${count(device.veus)} vEUs, ${percent(busy)} busy`), row('operators', `${count(t.operators)} in ${plural(device.programs.length, 'program')}`),
      row('arithmetic', `${metric(t.flops, 'FLOP')}, ${percent(t.flops / ((device.measured * 1e9 || t.predicted) / 1e9) / device.flops || 0)} of peak`), row('arena', size(t.arena)), row('constants', size(t.constants)),
      row('on the host', plural(device.hosts.length, 'operator'))));
}

function mixes() {
  const rows = working.map(device => {
    const spent = new Map(), all = sum(device.programs, p => sum(p.operators, o => o.seconds)) || 1;
    for (const p of device.programs) for (const o of p.operators) spent.set(o.type, (spent.get(o.type) || 0) + o.seconds / all);
    const parts = [...types.keys()].filter(t => spent.get(t) > 0.0005).map(t => el('i', { style: { width: `${spent.get(t) * 100}%`, background: colour(t) }, title: `${t}: ${percent(spent.get(t))}` }, spent.get(t) > 0.055 ? `${t} ${percent(spent.get(t))}` : ''));
    return [el('span', { class: 'name' }, device.name), el('div', { class: 'bar', role: 'img', 'aria-label': `Time by type on ${device.name}: ${[...spent].map(([t, s]) => `${t} ${percent(s)}`).join(', ')}` }, parts)];
  });
  return el('div', {}, el('div', { class: 'mix' }, rows.flat()), legend());
}

function legend() {
  const names = [...types.keys()];
  return el('ul', { class: 'legend' }, names.slice(0, HUES.length).map(t => el('li', {}, swatch(colour(t)), t)), names.length > HUES.length ? el('li', {}, swatch(colour(names[HUES.length])), `${names.length - HUES.length} other types`) : null);
}

function section(id, name, note, fill, perDevice = false) {
  const body = el('div', { class: perDevice ? 'columns' : null });
  const made = el('section', { id, 'aria-labelledby': `${id}-title` }, el('div', { class: 'title' }, el('h2', { id: `${id}-title` }, name), note ? el('span', { class: 'quiet small' }, note) : null), body);
  const render = () => {
    body.classList.toggle('one', shown.length < 2);
    body.replaceChildren(...(perDevice ? shown.flatMap(d => d.programs.map((p, k) => panel(d, p, k, fill))) : [fill()].flat()));
  };
  return { id, name, made, render, perDevice };
}

function panel(device, program, number, fill) {
  const found = fill(device, program);
  if (found.close) open.push(found.close);
  const several = shown.length > 1 || device.programs.length > 1;
  const title = several ? el('h3', {}, el('span', { class: 'name' }, device.name), device.programs.length > 1 ? ` program ${number + 1}` : '') : null;
  return el('div', { class: 'panel' }, el('div', { class: 'title' }, title, el('span', { class: 'small quiet' }, found.note || ''), el('span', { class: 'tools' }, found.tools || [])), found.element);
}

function graphFlow() {
  const { nodes, inputs, outputs, total } = data.graph, lead = inputs.length, owners = new Map();
  const device = shown[0], hosts = new Map((device?.hosts || []).map(h => [h[1], h]));
  (device?.programs || []).forEach(p => p.operators.forEach((o, k) => o.nodes.forEach(n => owners.has(n) || owners.set(n, [p, k]))));
  const items = [
    ...inputs.map(([name, type]) => ({ label: name, sub: type, port: true })),
    ...nodes.map(([op, name, , type], k) => ({ label: op, sub: type, fill: owners.has(k) ? colourOf(...owners.get(k)) : null })),
    ...outputs.map(([name, type]) => ({ label: name, sub: type, port: true })),
  ];
  const edges = nodes.flatMap((n, k) => n[2].map(p => [p < 0 ? -1 - p : lead + p, lead + k]));
  outputs.forEach(([, , maker], k) => maker !== null && maker !== undefined && (maker < 0 || maker < nodes.length) && edges.push([maker < 0 ? -1 - maker : lead + maker, lead + nodes.length + k]));
  const describe = k => {
    if (k < lead) return [inputs[k][0], ['input', inputs[k][1]]];
    if (k >= lead + nodes.length) return [outputs[k - lead - nodes.length][0], ['output', outputs[k - lead - nodes.length][1]]];
    const [op, name, , type, attributes, constants] = nodes[k - lead], owner = owners.get(k - lead), host = hosts.get(name);
    return [
      op, ['node', name], ['makes', type], attributes ? ['attributes', attributes] : null, constants.length ? ['constants', constants.slice(0, 4).join(', ')] : null,
      owner ? [`on ${device.name}`, `operator ${owner[0].operators[owner[1]].name}`] : host ? [`on the host with ${device.name}`, host[2]] : device ? [`on ${device.name}`, 'no operator of its own: a view, or merged with others'] : null,
    ].filter(Boolean);
  };
  const own = k => owners.get(k - lead);
  const made = flow({
    items, edges, describe, most: 520, label: `Graph of ${data.model}: ${plural(total, 'operator')}. Left and right arrows go through the operators.`,
    pick: k => own(k) && select(own(k)[0], [own(k)[1]], own(k)[0].operators[own(k)[1]].name), chosen: k => Boolean(own(k) && isSelected(...own(k))), dimmed: k => (own(k) ? isDimmed(...own(k)) : selection.operators.size > 0),
  });
  open.push(made.close);
  const note = `${plural(total, 'operator')}${total > nodes.length ? `, the first ${count(nodes.length)} drawn` : ''}, opset ${data.graph.opset}, ${plural(data.graph.constants[0], 'constant')} of ${size(data.graph.constants[1])}`;
  return el('div', { class: 'panel', style: { marginTop: '0.8rem' } }, el('div', { class: 'title' }, el('span', { class: 'small quiet' }, note), el('span', { class: 'tools' }, made.tools)), made.element);
}

function tileFlow(device, program) {
  prepareProgram(program);
  const items = program.operators.map((o, k) => ({ label: o.name, sub: o.nodes.map(n => data.graph.nodes[n][0]).join(' ') || o.type, fill: colourOf(program, k) }));
  const made = flow({
    items, edges: program.edges, most: 420, label: `Tile graph on ${device.name}: ${plural(items.length, 'operator')}`,
    describe: k => operatorLines(device, program, k).filter(Boolean), pick: k => select(program, [k], program.operators[k].name), chosen: k => isSelected(program, k), dimmed: k => isDimmed(program, k),
  });
  const table = program.decisions.length ? decisionTable(program) : null;
  const layers = device.layers.map(([name, scope, capacity, speed]) => `${name} (one per ${scope}${capacity ? `, ${size(capacity)}` : ''}, ${metric(speed, 'B/s')})`).join(' → ');
  const fused = sum(program.operators, o => o.chain.length);
  const element = el('div', {}, made.element, table ? el('div', { class: 'panel', style: { marginTop: '1rem' } }, el('div', { class: 'title' }, el('h3', {}, 'Decisions'), el('span', { class: 'small quiet' }, 'with predicted times'), el('span', { class: 'tools' }, table.tools)), table.element) : null);
  return { element, tools: made.tools, close: made.close, note: `${plural(fused, 'expression')} in ${plural(items.length, 'operator')}. Layers: ${layers}` };
}

const ranges = new Map();

function rangeOf(program) {
  prepareProgram(program);
  if (!ranges.has(program)) ranges.set(program, timeRange(program.end || 1));
  return ranges.get(program);
}

function schedule(device, program) {
  const made = scheduleChart(device, program, rangeOf(program));
  const loops = program.repeat > 1 ? `, one of ${count(program.repeat)} iterations` : '', variants = program.variants ? `, ${plural(program.variants, 'length variant')} not shown` : '';
  const unknown = program.end ? '' : ' No task times are known.';
  made.note = `policy ${program.policy}: ${plural(program.tasks, 'task')} in ${duration(program.end)} without launches${loops}${variants}.${unknown}`;
  if (program.choice) made.element.append(el('p', { class: 'detail' }, `Chosen policy: ${program.choice}`));
  return made;
}

function memory(device, program) {
  const made = memoryChart(device, program, rangeOf(program));
  made.note = made.count ? `arena ${size(program.arena)} for ${plural(made.count, 'buffer')} of ${size(made.total)} (${percent(program.arena / made.total)}); constants ${size(program.constants)}` : 'no buffers between operators';
  if (!made.count) made.element.replaceChildren();
  return made;
}

function compilation() {
  const device = d => {
    const steps = Object.entries(d.steps).map(([name, s]) => el('span', { class: 'chip' }, `${name} `, el('span', { class: 'quiet' }, seconds(s))));
    const facts = Object.entries(d.options).map(([name, value]) => `${name} ${value}`).join(', ');
    return el('div', { class: 'panel' }, el('div', { class: 'title' }, el('h3', { class: 'name' }, d.name)), el('p', { class: 'small quiet name' }, facts),
      el('p', {}, steps),
      d.hosts.length ? table([{ name: 'on the host', cell: h => [h[0], ' ', el('span', { class: 'quiet name' }, h[1])] }, { name: 'reason', cell: h => h[2] }], d.hosts, { limit: 10 }).element : null,
      d.later ? el('p', { class: 'small' }, `Compiled at run time: ${d.later}`) : null);
  };
  return el('div', { class: 'columns' }, working.map(device));
}

const sections = [
  section('overview', 'Overview', '', () => [el('div', { class: 'cards' }, data.devices.map(card)), working.length ? el('h3', { style: { marginTop: '1.5rem' } }, 'Time by type of operator ', el('span', { class: 'quiet small' }, 'predicted, as shares')) : null, working.length ? mixes() : null].filter(Boolean)),
  ...(working.length ? [
    section('graph', 'Graph', 'after all passes; colours show the type of operator, dark frames the selection', graphFlow),
    section('passes', 'Passes', data.passes.length ? 'calls that changed the graph, in order' : 'no pass changed the graph', () => (data.passes.length ? passTable() : [])),
    section('fusion', 'Fusion', 'each box is one operator of the device: the expressions that one task computes, joined at memory layers', tileFlow, true),
    section('schedule', 'Schedule', 'rows are execution units, colours are operators; point at a task to see its waits, drag to zoom', schedule, true),
    section('memory', 'Memory', 'bytes of the arena over time, predicted', memory, true),
    section('operators', 'Operators', 'equal operators are one row; a click selects them in all charts', operatorTable, true),
    section('compilation', 'Compilation', 'options, and the time of each step; some steps contain others', compilation),
  ] : []),
];

function draw(only) {
  for (const close of open.splice(0)) close();
  for (const range of ranges.values()) range.listeners.length = 0;
  for (const s of sections) if (!only || s.perDevice || s.id === 'graph') s.render();
}

function bar() {
  const choices = [...working.map(d => [d.name, [d]]), ...(working.length > 1 ? [['side by side', working]] : [])];
  const buttons = choices.map(([name, devices]) => el('button', { type: 'button', 'aria-pressed': String(devices.length === shown.length && devices[0] === shown[0]), onclick: event => {
    shown = devices;
    buttons.forEach(b => b.setAttribute('aria-pressed', String(b === event.currentTarget)));
    draw(true);
  } }, name));
  const colours = el('select', { 'aria-label': 'Colours show', onchange: event => ((scheme = event.target.value), draw(true)) }, Object.entries(SCHEMES).map(([key, name]) => el('option', { value: key }, `colours: ${name}`)));
  return el('div', {}, el('ul', {}, sections.map(s => el('li', {}, el('a', { href: `#${s.id}` }, s.name)))), colours, working.length > 1 ? el('div', { class: 'choice', role: 'group', 'aria-label': 'Devices to show' }, buttons) : null);
}

readTheme();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  readTheme();
  draw();
});
const ports = list => list.map(([name, type]) => `${name}: ${type}`).join(', ');
document.getElementById('head').append(el('h1', { class: 'name' }, data.model), data.graph.nodes ? el('p', { class: 'lead name' }, `${ports(data.graph.inputs)} → ${ports(data.graph.outputs)}`) : '');
document.getElementById('bar').append(bar());
document.getElementById('main').replaceChildren(...sections.map(s => s.made));
document.getElementById('foot').textContent = `rammer ${data.version}. Times are predictions of the cost model unless they are called measured; simulated times are not comparable with times of hardware.`;
addEventListener('keydown', event => {
  if (event.key === 'Escape' && selection.operators.size) select(selection.program, []);
});
draw();
requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready = String(Math.round(performance.now())))));
