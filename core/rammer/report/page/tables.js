// Tables that sort by a click on a head, with a limit on the rows that are shown at first.

// A column has a name, a cell and, if it sorts, a key. Narrow panels hide columns that are wide, or even those that are roomy.
const place = c => [c.number ? 'number' : c.tight ? 'tight' : '', c.wide ? 'wide' : '', c.roomy ? 'roomy' : ''].join(' ').trim() || null;

function table(columns, rows, { caption, limit = 40, pick, chosen, sorted } = {}) {
  let order = sorted ? { column: sorted, down: true } : null, most = limit;
  const body = el('tbody'), more = el('p', { class: 'more' });
  const heads = columns.map(c => {
    const head = el('th', { scope: 'col', class: place(c), title: c.hint });
    head.append(c.key ? el('button', { type: 'button', onclick: () => sort(c) }, c.name) : c.name);
    return head;
  });
  function sort(column) {
    order = { column, down: order?.column === column ? !order.down : Boolean(column.number) };
    fill();
  }
  function fill() {
    heads.forEach((head, k) => (order?.column === columns[k] ? head.setAttribute('aria-sort', order.down ? 'descending' : 'ascending') : head.removeAttribute('aria-sort')));
    const found = [...rows];
    if (order) {
      const { column, down } = order, compare = (a, b) => (typeof a === 'string' ? a.localeCompare(b) : a - b);
      found.sort((a, b) => (down ? -1 : 1) * compare(column.key(a), column.key(b)));
    }
    body.replaceChildren(...found.slice(0, most).map(row => {
      const line = el('tr', { class: [pick ? 'pick' : '', chosen && chosen(row) ? 'chosen' : ''].join(' ').trim() || null });
      line.append(...columns.map(c => el('td', { class: place(c) }, c.cell(row))));
      if (pick) line.addEventListener('click', () => pick(row));
      return line;
    }));
    more.replaceChildren(...(found.length > most ? [el('button', { type: 'button', onclick: () => ((most = Infinity), fill()) }, `Show all ${count(found.length)}`)] : []));
  }
  fill();
  const element = el('div', {}, el('div', { class: 'scroll' }, el('table', {}, caption ? el('caption', {}, caption) : null, el('thead', {}, el('tr', {}, heads)), body)), more);
  return { element, refill: fill };
}

const meter = (share, text, fill) => el('span', { class: 'meter' }, text, el('i', {}, el('b', { style: { width: `${Math.max(0, Math.min(1, share)) * 100}%`, background: fill || '' } })));
const swatch = fill => el('span', { class: 'swatch', style: { background: fill } });
const mono = text => el('span', { class: 'name mono' }, text);

function passTable() {
  const most = Math.max(1, ...data.passes.map(p => p.nodes[0]));
  return table([
    { name: 'pass', cell: p => mono(p.pass), tight: true },
    { name: 'operators', number: true, cell: p => meter(p.nodes[1] / most, p.nodes[0] === p.nodes[1] ? count(p.nodes[1]) : `${count(p.nodes[0])} → ${count(p.nodes[1])}`) },
    { name: 'constants', number: true, cell: p => (p.constants[0] === p.constants[1] ? count(p.constants[1]) : `${count(p.constants[0])} → ${count(p.constants[1])}`) },
    {
      name: 'change by type',
      cell: p => [
        ...p.changes.map(([op, n]) => el('span', { class: `chip ${n > 0 ? 'plus' : 'minus'}` }, `${n > 0 ? '+' : '−'}${count(Math.abs(n))} ${op}`)),
        ...(p.changes.length ? [] : [el('span', { class: 'quiet' }, 'operators rewritten in place')]), ...p.details.slice(0, 3).map(d => el('div', { class: 'small quiet' }, d)),
      ],
    },
  ], data.passes).element;
}

const VERDICTS = { connect: ['fused', 'separate'], batch: ['batched', 'separate'], cut: ['cut', 'whole'] };

function decisionTable(program) {
  const rows = program.decisions, choice = el('select', { 'aria-label': 'Decisions to show' });
  const kinds = [['all decisions', () => true], ['accepted', d => d[2]], ['rejected', d => !d[2]]];
  kinds.forEach(([name, test], k) => choice.append(el('option', { value: k }, `${name} (${count(sum(rows.filter(test), d => d[6]))})`)));
  const holder = el('div', {});
  const gain = d => (d[3] && d[4] !== null ? 1 - d[4] / d[3] : d[4] === null ? -Infinity : 0);
  const show = () => holder.replaceChildren(table([
    { name: 'decision', tight: true, key: d => VERDICTS[d[0]][d[2] ? 0 : 1], cell: d => el('span', { class: d[2] ? 'yes' : 'no' }, VERDICTS[d[0]][d[2] ? 0 : 1]) },
    { name: 'tensors', key: d => d[7], cell: d => [mono(d[7]), d[6] > 1 ? el('span', { class: 'quiet' }, ` × ${count(d[6])}`) : null, d[1] ? el('span', { class: 'link' }, ` in ${d[1]}`) : null, el('div', { class: 'small quiet narrow' }, d[5])] },
    { name: 'separate', number: true, wide: true, key: d => d[3] ?? Infinity, cell: d => (d[3] === null ? '–' : seconds(d[3])), hint: 'Predicted time of separate or whole operators' },
    { name: 'together', number: true, wide: true, key: d => d[4] ?? Infinity, cell: d => (d[4] === null ? '–' : seconds(d[4])), hint: 'Predicted time of the fused, batched or cut operators' },
    { name: 'gain', number: true, key: gain, cell: d => (!isFinite(gain(d)) ? '–' : gain(d) < -1 ? `${digits(1 - gain(d), 2)}× slower` : `${Math.round(gain(d) * 100)}%`.replace('-', '−')) },
    { name: 'reason', wide: true, cell: d => d[5] },
  ], rows.filter(kinds[choice.value || 0][1]), { limit: 12 }).element);
  choice.addEventListener('change', show);
  show();
  return { element: holder, tools: [choice] };
}

// Operators that do the same work with the same kernel are one row.
function grouped(program) {
  const found = new Map();
  program.operators.forEach((o, index) => {
    if (!found.has(o.form)) found.set(o.form, []);
    found.get(o.form).push(index);
  });
  return [...found.values()];
}

function operatorTable(device, program) {
  const at = g => program.operators[g[0]], all = sum(program.operators, o => o.seconds) || 1;
  const measured = program.operators.some(o => o.measured !== null), each = g => g.reduce((t, k) => t + (program.operators[k].measured || 0), 0);
  const spent = g => at(g).seconds * g.length, best = g => (measured && each(g) ? each(g) : spent(g)) || Infinity;
  const compute = g => (at(g).flops * g.length) / best(g) / device.flops, memory = g => (at(g).bytes * g.length) / best(g) / device.bandwidth;
  const peak = g => Math.max(compute(g), memory(g));
  const columns = [
    { name: 'operator', tight: true, key: g => at(g).name, cell: g => [swatch(colourOf(program, g[0])), mono(at(g).name), g.length > 1 ? el('span', { class: 'quiet' }, ` × ${count(g.length)}`) : null] },
    { name: 'predicted', number: true, key: spent, cell: g => seconds(spent(g)) },
    { name: 'share', number: true, key: spent, cell: g => meter(spent(g) / all, percent(spent(g) / all), colourOf(program, g[0])) },
    measured ? { name: 'measured', number: true, key: each, cell: g => seconds(each(g)), hint: at([0]).how } : null,
    { name: 'of peak', number: true, key: peak, hint: 'Share of the peak that limits the operator: arithmetic in float32, or device memory. A kernel that needs fewer operations than its expression, such as Winograd, may exceed 100%.', cell: g => meter(peak(g), [el('span', { class: 'quiet' }, compute(g) >= memory(g) ? 'compute ' : 'memory '), percent(peak(g))]) },
    { name: 'work', number: true, roomy: true, key: g => at(g).flops, cell: g => metric(at(g).flops * g.length, 'FLOP') },
    { name: 'traffic', number: true, roomy: true, key: g => at(g).bytes, cell: g => size(at(g).bytes * g.length) },
    { name: 'ONNX operators', cell: g => { const found = at(g).nodes.map(n => data.graph.nodes[n]); return [found.slice(0, 4).map(n => n[0]).join(', ') || el('span', { class: 'quiet' }, 'merged'), found.length > 4 ? el('span', { class: 'quiet' }, ` and ${found.length - 4} more`) : null]; } },
    { name: 'kernel', roomy: true, key: g => at(g).family, cell: g => [el('span', { title: at(g).config }, at(g).family), el('div', { class: 'small quiet' }, at(g).tile)] },
    { name: 'tasks', number: true, roomy: true, key: g => at(g).tasks, cell: g => count(at(g).tasks) },
  ].filter(Boolean);
  const made = table(columns, grouped(program), {
    sorted: columns[1], limit: 15, pick: g => select(program, g, at(g).name), chosen: g => g.some(k => isSelected(program, k)),
    caption: `${plural(program.operators.length, 'operator')}; ${measured ? 'shares of peak from measured times' : 'shares of peak from predicted times'}`,
  });
  selection.listeners.add(made.refill);
  return { element: made.element, close: () => selection.listeners.delete(made.refill) };
}
