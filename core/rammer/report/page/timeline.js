// Charts over the time of a program: the schedule of its tasks and the memory plan. Both share one visible range.
const GUTTER = 58, AXIS = 24, STRIP = 34;

// Add what follows from the data: durations, ends, and the span of every operator.
function prepareProgram(program) {
  if (program.end !== undefined) return;
  program.end = 0;
  program.spans = program.operators.map(() => [Infinity, 0]);
  for (const [first, last, runs] of program.rows)
    for (const run of runs) {
      const end = run[6] + run[3] * program.operators[run[0]].task, span = program.spans[run[0]];
      span[0] = Math.min(span[0], run[6]);
      span[1] = Math.max(span[1], end);
      program.end = Math.max(program.end, end);
    }
  program.busy = sum(program.rows, ([first, last, runs]) => (last - first + 1) * sum(runs, r => r[3] * program.operators[r[0]].task));
  program.measuredEnd = program.measured.reduce((end, s) => Math.max(end, s[3] + s[4]), 0);
  program.lanes = new Map();
  for (const s of [...program.measured].sort((a, b) => a[3] - b[3])) {
    if (!program.lanes.has(s[0])) program.lanes.set(s[0], []);
    const ends = program.lanes.get(s[0]);
    let lane = ends.findIndex(end => end <= s[3] + 0.05);
    if (lane < 0) lane = ends.push(0) - 1;
    ends[lane] = s[3] + s[4];
    s[5] = lane;
  }
}

// The visible range of time, shared by charts, with zoom and pan.
function timeRange(end) {
  const range = { from: 0, to: end, end, listeners: [] };
  range.set = (from, to) => {
    const width = Math.min(range.end, Math.max(to - from, range.end / 1e6));
    range.from = Math.max(0, Math.min(from, range.end - width));
    range.to = range.from + width;
    range.listeners.forEach(f => f());
  };
  range.zoom = (factor, at = (range.from + range.to) / 2) => range.set(at - (at - range.from) / factor, at + (range.to - at) / factor);
  range.pan = share => range.set(range.from + (range.to - range.from) * share, range.to + (range.to - range.from) * share);
  range.reset = end => {
    if (end) range.end = end;
    range.set(0, range.end);
  };
  return range;
}

function ticks(from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough) || power * 10, found = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) found.push(t);
  return found;
}

function drawTimes(context, range, width, top, height) {
  const scale = (width - GUTTER) / (range.to - range.from);
  context.font = `11px ${FONT}`;
  context.textAlign = 'center';
  for (const t of ticks(range.from, range.to, Math.max(2, (width - GUTTER) / 110))) {
    const x = GUTTER + (t - range.from) * scale;
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, top);
    context.lineTo(Math.round(x) + 0.5, top + height);
    context.stroke();
    context.fillStyle = theme.quiet;
    const text = duration(t), half = context.measureText(text).width / 2;
    context.fillText(text, Math.max(GUTTER + half - 4, Math.min(x, width - half - 1)), top + height + 15);
  }
  context.textAlign = 'left';
}

// Drag selects a range, Ctrl and the wheel zoom, Shift and drag or the wheel sideways pan, a double click shows all.
function steer(view, range, hooks) {
  const canvas = view.canvas, timeAt = x => range.from + ((x - GUTTER) / (view.width - GUTTER)) * (range.to - range.from);
  let drag = null;
  canvas.tabIndex = 0;
  canvas.addEventListener('wheel', event => {
    if (event.ctrlKey || event.metaKey) range.zoom(Math.exp(-event.deltaY * 0.004), timeAt(event.offsetX));
    else if (event.deltaX || event.shiftKey) range.pan((event.deltaX || event.deltaY) / view.width);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener('pointerdown', event => {
    if (event.button || event.offsetX < GUTTER) return;
    drag = { x: event.offsetX, pan: event.shiftKey, from: range.from, to: range.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', event => {
    if (!drag) return hooks.hover(event.offsetX, event.offsetY, event);
    drag.moved ||= Math.abs(event.offsetX - drag.x) > 4;
    if (!drag.moved) return;
    hideTip();
    if (drag.pan) {
      const moved = ((event.offsetX - drag.x) / (view.width - GUTTER)) * (drag.to - drag.from);
      range.set(drag.from - moved, drag.to - moved);
    } else {
      view.brush = [drag.x, event.offsetX];
      view.redraw();
    }
  });
  canvas.addEventListener('pointerup', event => {
    if (!drag) return;
    if (!drag.moved) hooks.click(event.offsetX, event.offsetY, event);
    else if (!drag.pan) {
      const [a, b] = [timeAt(drag.x), timeAt(event.offsetX)].sort((p, q) => p - q);
      range.set(a, b);
    }
    view.brush = drag = null;
    view.redraw();
  });
  canvas.addEventListener('pointerleave', () => {
    hideTip();
    hooks.hover(-1, -1, null);
  });
  canvas.addEventListener('dblclick', () => range.reset());
  canvas.addEventListener('keydown', event => {
    const acts = {
      ArrowLeft: () => range.pan(-0.15), ArrowRight: () => range.pan(0.15), '+': () => range.zoom(1.6), '=': () => range.zoom(1.6), '-': () => range.zoom(1 / 1.6),
      0: () => range.reset(), Home: () => range.reset(), n: () => hooks.step(1), p: () => hooks.step(-1),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    acts[event.key]();
    event.preventDefault();
  });
}

function drawBrush(context, view, height) {
  if (!view.brush) return;
  const [a, b] = [...view.brush].sort((p, q) => p - q);
  context.fillStyle = theme.accent;
  context.globalAlpha = 0.16;
  context.fillRect(a, 0, b - a, height);
  context.globalAlpha = 1;
}

function operatorLines(device, program, index) {
  const o = program.operators[index];
  const names = o.nodes.map(n => data.graph.nodes[n]);
  return [
    o.name,
    ['ONNX', names.length ? names.slice(0, 4).map(n => `${n[1]} (${n[0]})`).join(', ') + (names.length > 4 ? ` and ${names.length - 4} more` : '') : 'none'],
    ['fused', o.chain.map(([kind, layer], k) => `${k ? (layer ? `—${layer}→ ` : '· ') : ''}${o.computes[k]}`).join(' ')],
    ['kernel', `${o.family}${o.config ? ` (${o.config})` : ''}, tile ${o.tile}`],
    ['tasks', `${count(o.tasks)}, ${duration(o.task)} each; together ${seconds(o.seconds)}`],
    o.measured !== null ? [o.how, seconds(o.measured)] : null,
  ];
}

// Operators in the order of their first tasks, for the keyboard.
function stepper(device, program) {
  const order = program.operators.map((_, k) => k).sort((a, b) => program.spans[a][0] - program.spans[b][0]);
  return step => {
    const now = selection.program === program && selection.operators.size ? order.indexOf([...selection.operators][0]) : step > 0 ? -1 : order.length;
    const next = order[Math.max(0, Math.min(order.length - 1, now + step))];
    if (next === undefined || isSelected(program, next)) return;
    select(program, [next], operatorLines(device, program, next).filter(Boolean).map(l => (typeof l === 'string' ? l : l.join(' '))).join('. '));
  };
}

function scheduleChart(device, program, range) {
  const rows = program.veus, drawn = Math.max(90, Math.min(340, rows * 30)), height = STRIP + 8 + drawn + AXIS;
  const label = `Predicted schedule of ${program.name}: ${plural(rows, 'execution unit')} over ${duration(program.end)}. Keys: arrows pan, plus and minus zoom, 0 shows all, n and p select operators.`;
  const view = surface(height, label, draw), top = STRIP + 8;
  let measured = false, hovered = null, low = 0, high = rows;
  const x = t => GUTTER + ((t - range.from) / (range.to - range.from)) * (view.width - GUTTER), y = r => top + Math.round(((r - low) / (high - low)) * drawn);
  range.listeners.push(view.redraw);

  function drawRun(context, operator, x0, x1, y0, y1, step, line = y1 - y0) {
    context.globalAlpha = isDimmed(program, operator) ? 0.16 : 1;
    context.fillStyle = colourOf(program, operator);
    const left = Math.max(x0, GUTTER), right = Math.min(Math.max(x1, x0 + 0.6), view.width);
    if (right <= left) return;
    context.fillRect(left, y0, right - left, y1 - y0);
    if (step > 5) {
      context.fillStyle = theme.paper;
      for (let at = x0 + step; at < x1 - 1; at += step) if (at > GUTTER && at < view.width) context.fillRect(at - 0.4, y0, 0.8, y1 - y0);
    }
    if (right - left > 34 && y1 - y0 > 13) {
      context.fillStyle = theme.on;
      context.font = `600 11px ${FONT}`;
      context.fillText(clipped(context, program.operators[operator]?.name ?? '', right - left - 8), left + 4, y0 + Math.max(12, line > 13 ? line / 2 + 4 : 0));
    }
    context.globalAlpha = 1;
  }

  function draw(context, width) {
    context.clearRect(0, 0, width, height);
    drawStrip(context, width);
    context.fillStyle = theme.track;
    context.fillRect(GUTTER, top, width - GUTTER, drawn);
    drawTimes(context, range, width, top, drawn);
    context.save();
    context.beginPath();
    context.rect(GUTTER, top, width - GUTTER, drawn);
    context.clip();
    const tall = drawn / (high - low);
    if (measured)
      for (const s of program.measured) {
        if (s[3] > range.to || s[3] + s[4] < range.from) continue;
        const lanes = program.lanes.get(s[0]).length, y0 = y(s[0]) + (s[5] * tall) / lanes;
        drawRun(context, s[1], x(s[3]), x(s[3] + s[4]), y0, y0 + tall / lanes, 0);
      }
    else
      for (const [first, last, runs] of program.rows)
        for (const run of runs) {
          const each = program.operators[run[0]].task;
          if (run[6] > range.to || run[6] + run[3] * each < range.from) continue;
          drawRun(context, run[0], x(run[6]), x(run[6] + run[3] * each), y(first), y(last + 1), x(each) - x(0), tall);
        }
    if (tall >= 5) {
      context.fillStyle = theme.paper;
      for (let r = 1; r < rows; r++) context.fillRect(GUTTER, y(r) - 0.5, width, 1);
    }
    if (hovered) drawWaits(context);
    drawBrush(context, view, height);
    context.restore();
    context.fillStyle = theme.quiet;
    context.font = `11px ${FONT}`;
    context.textAlign = 'right';
    const every = Math.max(1, Math.ceil(26 / tall));
    for (let r = 0; r < rows; r += every) if (y(r) + Math.min(tall, 20) <= top + drawn + 4) context.fillText(`v${r}`, GUTTER - 7, y(r) + (tall > 12 ? tall / 2 + 4 : 9));
    context.textAlign = 'left';
  }

  function drawStrip(context, width) {
    const bins = Math.max(1, Math.floor(width - GUTTER)), load = new Float64Array(bins + 1), whole = measured ? program.measuredEnd : program.end, per = whole / bins;
    const add = (from, to, weight) => {
      const a = Math.min(bins - 1, Math.floor(from / per)), b = Math.min(bins - 1, Math.floor(to / per));
      if (a === b) load[a] += (to - from) * weight;
      else {
        load[a] += ((a + 1) * per - from) * weight;
        for (let k = a + 1; k < b; k++) load[k] += per * weight;
        load[b] += (to - b * per) * weight;
      }
    };
    if (measured) for (const s of program.measured) add(s[3], s[3] + s[4], 1 / program.lanes.get(s[0]).length);
    else for (const [first, last, runs] of program.rows) for (const r of runs) add(r[6], r[6] + r[3] * program.operators[r[0]].task, last - first + 1);
    context.fillStyle = theme.track;
    context.fillRect(GUTTER, 2, width - GUTTER, STRIP - 4);
    context.fillStyle = theme.faint;
    context.globalAlpha = 0.75;
    for (let k = 0; k < bins; k++) {
      const share = Math.min(1, load[k] / per / rows);
      context.fillRect(GUTTER + k, 2 + (STRIP - 4) * (1 - share), 1, (STRIP - 4) * share);
    }
    context.globalAlpha = 1;
    context.fillStyle = theme.quiet;
    context.font = `11px ${FONT}`;
    context.textAlign = 'right';
    context.fillText('busy', GUTTER - 7, STRIP / 2 + 4);
    context.textAlign = 'left';
    if (range.to - range.from < range.end * 0.999) {
      const a = GUTTER + (range.from / range.end) * (width - GUTTER), b = GUTTER + (range.to / range.end) * (width - GUTTER);
      context.strokeStyle = theme.accent;
      context.lineWidth = 2;
      context.strokeRect(a, 2, Math.max(2, b - a), STRIP - 4);
    }
  }

  function drawWaits(context) {
    const { run, row } = hovered, x1 = x(run[6]), y1 = y(row + 0.5);
    context.strokeStyle = theme.ink;
    context.fillStyle = theme.ink;
    context.lineWidth = 1.5;
    for (let k = 0; k < run[5].length; k += 2) {
      const [, , , full, veu] = program.counters[run[5][k]], x0 = x(full), y0 = y(veu + 0.5);
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0 - 24, (y0 + y1) / 2, x1 - 24, (y0 + y1) / 2, x1, y1);
      context.stroke();
      context.beginPath();
      context.arc(x0, y0, 3.5, 0, 7);
      context.fill();
    }
    context.strokeRect(x1, y(row) + 1, Math.max(2, x(run[6] + run[3] * program.operators[run[0]].task) - x1), Math.max(2, y(row + 1) - y(row) - 2));
  }

  function waitLines(run) {
    const lines = [];
    for (let k = 0; k < run[5].length; k += 2) {
      const [operator, first, last, full] = program.counters[run[5][k]];
      lines.push(['waits for', `${count(run[5][k + 1])} of ${plural(last - first, 'task')} of ${program.operators[operator].name}, finished at ${duration(full)}`]);
    }
    return lines.length > 6 ? [...lines.slice(0, 6), `and ${lines.length - 6} more waits`] : lines;
  }

  function find(px, py) {
    const row = Math.floor(low + ((py - top) / drawn) * (high - low)), t = range.from + ((px - GUTTER) / (view.width - GUTTER)) * (range.to - range.from);
    if (px < GUTTER || py < top || py > top + drawn) return null;
    if (measured) {
      const near = ((range.to - range.from) / (view.width - GUTTER)) * 2, lanes = program.lanes.get(row)?.length || 1;
      const lane = Math.floor(((py - y(row)) / (y(row + 1) - y(row))) * lanes);
      const span = program.measured.find(s => s[0] === row && s[5] === lane && s[3] - near <= t && t <= s[3] + s[4] + near);
      return { row, t, span };
    }
    const group = program.rows.find(([first, last]) => first <= row && row <= last);
    if (!group) return { row, t };
    let after = null;
    for (const run of group[2]) {
      if (run[6] <= t && t <= run[6] + run[3] * program.operators[run[0]].task) return { row, t, run, group };
      if (run[6] > t && (!after || run[6] < after[6])) after = run;
    }
    return { row, t, after };
  }

  function hover(px, py, event) {
    const found = event && find(px, py), before = hovered;
    hovered = found && found.run ? found : null;
    if (hovered?.run !== before?.run || hovered?.row !== before?.row) view.redraw();
    if (!found) return hideTip();
    if (found.run) {
      const { run, row, t, group } = found, o = program.operators[run[0]], place = Math.min(run[3] - 1, Math.floor((t - run[6]) / (o.task || 1)));
      const begin = run[6] + place * o.task, task = run[1] + (row - group[0]) * run[2] + place * run[4];
      showTip(event.clientX, event.clientY, [
        `${o.name}, task ${count(task)} of ${count(o.tasks)}`, ['on', `v${row}, ${duration(begin)} to ${duration(begin + o.task)} (${duration(o.task)})`],
        ...waitLines(run), ...operatorLines(device, program, run[0]).slice(1, 4),
      ]);
    } else if (found.span) {
      const [veu, operator, task, start, length] = found.span;
      showTip(event.clientX, event.clientY, [`${program.operators[operator]?.name ?? 'unknown'}, task ${count(task)}`, ['measured on', `v${veu}, ${duration(start)} to ${duration(start + length)} (${duration(length)})`]]);
    } else if (found.after) showTip(event.clientX, event.clientY, [`v${found.row} waits until ${duration(found.after[6])}`, ...waitLines(found.after)]);
    else hideTip();
  }

  steer(view, range, {
    hover,
    click: (px, py) => {
      const found = find(px, py), operator = found?.run?.[0] ?? found?.span?.[1];
      if (operator !== undefined && operator >= 0) select(program, [operator], program.operators[operator].name);
      else if (selection.operators.size) select(program, []);
    },
    step: stepper(device, program),
  });
  const element = el('div', { class: 'chart' }, view.canvas);
  view.watch(element);
  const button = (name, on) => el('button', { type: 'button', 'aria-pressed': String(on) }, name);
  const [a, b] = [button('predicted', true), button('measured', false)];
  const swap = to => () => {
    measured = to;
    a.setAttribute('aria-pressed', String(!to));
    b.setAttribute('aria-pressed', String(to));
    range.reset(to ? program.measuredEnd : program.end);
  };
  a.addEventListener('click', swap(false));
  b.addEventListener('click', swap(true));
  const tools = [
    program.measured.length ? el('span', { class: 'choice' }, a, b) : null,
    ...[['−', 'Zoom out', () => range.zoom(1 / 1.6)], ['+', 'Zoom in', () => range.zoom(1.6)], ['all', 'Show all', () => range.reset()]].map(([text, hint, act]) =>
      el('button', { type: 'button', 'aria-label': hint, title: hint, onclick: act }, text)),
  ];
  return { element, tools, close: view.close };
}

function memoryChart(device, program, range) {
  const drawn = 240, height = drawn + AXIS + 6;
  const buffers = program.buffers.filter(b => b[1] === 'arena' && b[3]).map(([name, , offset, bytes, writers, readers]) => {
    const uses = [...writers, ...readers].map(o => program.spans[o]).filter(s => s[1] >= s[0]);
    return { name, offset, bytes, writers, readers, from: Math.min(...uses.map(s => s[0])), to: Math.max(...uses.map(s => s[1])) };
  }).filter(b => isFinite(b.from));
  const label = `Memory plan of ${program.name}: ${plural(buffers.length, 'buffer')} in an arena of ${size(program.arena)}.`;
  const view = surface(height, label, draw);
  const x = t => GUTTER + ((t - range.from) / (range.to - range.from)) * (view.width - GUTTER), y = bytes => 4 + drawn - (bytes / program.arena) * drawn;
  range.listeners.push(view.redraw);

  function draw(context, width) {
    context.clearRect(0, 0, width, height);
    context.fillStyle = theme.track;
    context.fillRect(GUTTER, 4, width - GUTTER, drawn);
    drawTimes(context, range, width, 4, drawn);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 4, width - GUTTER, drawn);
    context.clip();
    for (const b of buffers) {
      if (b.from > range.to || b.to < range.from) continue;
      const x0 = x(b.from), x1 = Math.max(x(b.to), x0 + 1), y0 = y(b.offset + b.bytes), y1 = y(b.offset), lit = b.writers.concat(b.readers).some(o => isSelected(program, o));
      context.globalAlpha = selection.program === program && selection.operators.size && !lit ? 0.16 : 1;
      context.fillStyle = colourOf(program, b.writers[0]);
      context.fillRect(x0, y0, x1 - x0, Math.max(0.8, y1 - y0));
      if (x1 - x0 > 4 && y1 - y0 > 4) {
        context.strokeStyle = theme.paper;
        context.lineWidth = 1;
        context.strokeRect(x0 + 0.5, y0 + 0.5, x1 - x0 - 1, y1 - y0 - 1);
      }
      const left = Math.max(x0, GUTTER), right = Math.min(x1, width);
      if (right - left > 46 && y1 - y0 > 13) {
        context.fillStyle = theme.on;
        context.font = `600 11px ${FONT}`;
        context.fillText(clipped(context, `${b.name}, ${size(b.bytes)}`, right - left - 10), left + 5, (y0 + y1) / 2 + 4);
      }
    }
    context.globalAlpha = 1;
    drawBrush(context, view, height);
    context.restore();
    context.fillStyle = theme.quiet;
    context.font = `11px ${FONT}`;
    context.textAlign = 'right';
    const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(1, program.arena)) / 10));
    for (const at of ticks(0, program.arena / unit, 5)) context.fillText(size(at * unit), GUTTER - 7, Math.max(12, y(at * unit) + 3));
    context.textAlign = 'left';
  }

  function find(px, py) {
    if (px < GUTTER || py > drawn + 4) return null;
    const t = range.from + ((px - GUTTER) / (view.width - GUTTER)) * (range.to - range.from), at = ((4 + drawn - py) / drawn) * program.arena;
    return buffers.find(b => b.from <= t && t <= b.to && b.offset <= at && at <= b.offset + b.bytes) || null;
  }
  const names = operators => (operators.length > 5 ? [...operators.slice(0, 5).map(o => program.operators[o].name), `${operators.length - 5} more`] : operators.map(o => program.operators[o].name)).join(', ') || 'none';
  steer(view, range, {
    hover: (px, py, event) => {
      const b = event && find(px, py);
      if (!b) return hideTip();
      showTip(event.clientX, event.clientY, [
        b.name, ['bytes', `${size(b.bytes)} at ${size(b.offset)}`], ['live', `${duration(b.from)} to ${duration(b.to)}`], ['written by', names(b.writers)], ['read by', names(b.readers)],
      ]);
    },
    click: (px, py) => {
      const b = find(px, py);
      if (b) select(program, [...b.writers], b.name);
      else if (selection.operators.size) select(program, []);
    },
    step: stepper(device, program),
  });
  const element = el('div', { class: 'chart' }, view.canvas);
  view.watch(element);
  return { element, tools: [], close: view.close, total: sum(buffers, b => b.bytes), count: buffers.length };
}
