// The page of a server: figures by a stream of one snapshot a second, and events as they happen.
//
// A snapshot has counters since the server's start, as /metrics.json has them; rates and quantiles of the last second
// are differences of two. Names and messages come from images and clients: they become text, never markup.
'use strict';

const PREFIX = 'blockhouse_';
const HISTORY = 120; // seconds
const MAX_EVENTS = 200;
const RETRY = 3000; // ms
const WRITES = ['write', 'write_fua', 'write_zeroes'];

const $ = id => document.getElementById(id);
const disks = new Map();
let selected = null;
let before = null;
let latest = null;
let goneSince = null;

// An element with attributes and children; strings are text.
function make(tag, attributes = {}, ...children) {
  const isSvg = ['svg', 'path', 'line'].includes(tag);
  const element = isSvg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const number = (text, attributes = {}) => make('td', { class: 'number', ...attributes }, text);

// Three digits and a unit.
function scaled(value, base, units) {
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) { value /= base; at++; }
  const digits = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[at]}`;
}
const count = value => scaled(value, 1000, ['', ' k', ' M', ' G']);
const bytes = value => scaled(value, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB', ' PiB']);
function duration(seconds) {
  if (seconds === null) return '–';
  if (seconds === Infinity) return '> 1 min';
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms` : `${seconds.toFixed(2)} s`;
}
function span(seconds) {
  const parts = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const first = parts.findIndex(([length]) => seconds >= length);
  if (first < 0) return '0 s';
  const [length, unit] = parts[first];
  const rest = parts[first + 1];
  const more = rest ? Math.floor(seconds % length / rest[0]) : 0;
  return `${Math.floor(seconds / length)} ${unit}${more ? ` ${more} ${rest[1]}` : ''}`;
}
const clock = time => time.toLocaleTimeString([], { hour12: false });

// The samples of a family; what a server lacks is empty.
const family = (snapshot, name) => snapshot?.metrics[PREFIX + name] ?? [];

// What a family has for each disk and two more labels: {disk: {key: sample}}.
function byDisk(snapshot, name, labels) {
  const found = new Map();
  for (const sample of family(snapshot, name)) {
    const key = labels.map(label => sample.labels[label]).join(' ');
    const of = found.get(sample.labels.disk) ?? new Map();
    const seen = of.get(key);
    // Several errnos, one sum.
    of.set(key, seen ? { ...sample, value: seen.value + sample.value } : sample);
    found.set(sample.labels.disk, of);
  }
  return found;
}

// Durations that were added between two samples: pairs of a bound in seconds and a number.
function added(sample, old) {
  const had = new Map((old?.buckets ?? []).map(([bound, n]) => [bound, n]));
  return sample.buckets.map(([bound, n]) => [bound ?? Infinity, n - (had.get(bound) ?? 0)]).filter(([, n]) => n > 0);
}
function quantile(buckets, part) {
  const sorted = buckets.toSorted((a, b) => a[0] - b[0]);
  const all = sorted.reduce((sum, [, n]) => sum + n, 0);
  let left = Math.ceil(all * part);
  for (const [bound, n] of sorted) if ((left -= n) <= 0) return bound;
  return null;
}

// Rows of requests or of stages of a disk: what one operation did in the last `seconds`.
function series(kind, first, now, old, seconds) {
  const [durations, wasDurations] = [now, old].map(one => byDisk(one, `${kind}_duration_seconds`, [first, 'operation']));
  const [moved, wasMoved] = [now, old].map(one => byDisk(one, `${kind}_bytes_total`, [first, 'operation']));
  const rows = new Map();
  for (const [disk, samples] of durations) {
    rows.set(disk, [...samples].map(([key, sample]) => {
      const past = wasDurations.get(disk)?.get(key);
      const [size, wasSize] = [moved, wasMoved].map(one => one.get(disk)?.get(key)?.value ?? 0);
      return {
        first: sample.labels[first], operation: sample.labels.operation, all: sample.count,
        rate: (sample.count - (past?.count ?? 0)) / seconds,
        bytes: (size - wasSize) / seconds, buckets: added(sample, past),
      };
    }));
  }
  return rows;
}

function take(snapshot) {
  before = latest;
  latest = snapshot;
  // The counters of another server begin anew; an upgrade goes on with them, and with the time.
  const started = one => family(one, 'start_time_seconds')[0]?.value;
  if (started(before) !== started(latest)) before = null;
  const seconds = before ? Math.max((latest.time - before.time) / 1000, .1) : Infinity;
  const requests = series('request', 'export', latest, before ?? latest, seconds);
  const stages = series('stage', 'stage', latest, before ?? latest, seconds);
  const sums = new Map();
  // The sum of a disk's samples; each family is read once, however many disks there are.
  const value = (name, disk) => {
    if (!sums.has(name)) sums.set(name, byDisk(latest, name, []));
    return sums.get(name).get(disk)?.get('')?.value ?? 0;
  };
  const known = new Set();
  for (const { labels } of family(latest, 'disk_info')) {
    const name = labels.disk;
    known.add(name);
    const disk = disks.get(name) ?? { name, history: [] };
    disks.set(name, disk);
    const rows = requests.get(name) ?? [];
    const sum = (of, what) => rows.filter(row => of(row.operation)).reduce((all, row) => all + row[what], 0);
    const buckets = rows.flatMap(row => row.buckets);
    Object.assign(disk, {
      format: labels.format, path: labels.path, requests: rows, stages: stages.get(name) ?? [], buckets,
      reads: sum(one => one === 'read', 'rate'), writes: sum(one => WRITES.includes(one), 'rate'),
      bytes: sum(one => one === 'read' || WRITES.includes(one), 'bytes'),
      readBytes: sum(one => one === 'read', 'bytes'), writeBytes: sum(one => WRITES.includes(one), 'bytes'),
      p50: quantile(buckets, .5), p99: quantile(buckets, .99),
      depth: value('disk_requests_in_flight', name), clients: value('clients', name),
      errors: value('request_errors_total', name), waiting: value('throttle_waiting_requests', name),
      wait: family(latest, 'disk_wait_seconds').find(one => one.labels.disk === name),
      held: value('held_requests', name),
      size: value('disk_size_bytes', name), allocated: value('disk_allocated_bytes', name),
    });
    disk.history.push({
      reads: disk.reads, writes: disk.writes, p50: disk.p50, p99: disk.p99,
      readBytes: disk.readBytes, writeBytes: disk.writeBytes, depth: disk.depth,
    });
    if (disk.history.length > HISTORY) disk.history.shift();
  }
  for (const name of disks.keys()) if (!known.has(name)) disks.delete(name);
  if (selected && !disks.has(selected)) selected = null;
  if (!document.hidden) draw();
}

function draw() {
  if (!latest) return;
  drawHead();
  drawDisks();
  drawDetail();
  drawJobs();
}

function drawHead() {
  const version = family(latest, 'build_info')[0]?.labels.version ?? '';
  const started = family(latest, 'start_time_seconds')[0]?.value ?? latest.time / 1000;
  $('server').textContent = `${version} at ${location.host || 'this host'}, up ${span(latest.time / 1000 - started)}`;
  const all = [...disks.values()];
  const sum = what => all.reduce((total, disk) => total + disk[what], 0);
  const buckets = all.flatMap(disk => disk.buckets);
  const totals = [
    ['disks', count(all.length)], ['reads/s', count(sum('reads'))], ['writes/s', count(sum('writes'))],
    ['read/s', bytes(sum('readBytes'))], ['written/s', bytes(sum('writeBytes'))],
    ['p50', duration(quantile(buckets, .5))], ['p99', duration(quantile(buckets, .99))],
    ['in flight', count(sum('depth'))], ['clients', count(sum('clients'))], ['errors', count(sum('errors'))],
  ];
  $('totals').replaceChildren(...totals.map(([name, value]) => {
    const isBad = name === 'errors' && value !== '0';
    return make('div', {}, make('dt', {}, name), make('dd', isBad ? { class: 'bad' } : {}, value));
  }));
}

// Rows stay in their places: the order of names, so that what is read does not jump; the busiest is marked.
function drawDisks() {
  const body = $('disks').tBodies[0];
  const load = disk => disk.reads + disk.writes;
  const busiest = Math.max(...[...disks.values()].map(load));
  const names = [...disks.keys()].toSorted();
  const rows = names.map(name => {
    const disk = disks.get(name);
    disk.row ??= make('tr', {}, make('th', { scope: 'row' }, ...chooser(name)));
    disk.row.classList.toggle('busy', load(disk) > 0 && load(disk) === busiest);
    disk.row.querySelector('button').setAttribute('aria-pressed', name === selected);
    const waits = waitsFor(disk);
    disk.row.querySelector('.format').textContent = disk.format + waits.map(one => `, ${one}`).join('');
    disk.row.querySelector('.format').classList.toggle('bad', waits.length > 0);
    const depth = disk.waiting ? `${disk.waiting} requests wait because of --limit` : 'requests in flight';
    while (disk.row.cells.length > 1) disk.row.lastChild.remove();
    disk.row.append(
      number(count(disk.reads)), number(count(disk.writes)), number(bytes(disk.bytes)),
      number(duration(disk.p50)), number(duration(disk.p99)), number(count(disk.depth), { title: depth }),
      number(count(disk.clients)), number(count(disk.errors), disk.errors ? { class: 'number bad' } : {}),
      number(`${bytes(disk.allocated)} of ${bytes(disk.size)}`),
      make('td', {}, spark(disk)));
    return disk.row;
  });
  // A row that has the focus keeps it where it is not moved.
  rows.forEach((row, at) => { if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null); });
  while (body.rows.length > rows.length) body.lastChild.remove();
}

// The backing file, and the room on the host, that requests of a disk wait for.
function waitsFor({ wait, held }) {
  return [
    wait ? `waits ${span(wait.value)} for ${wait.labels.file}` : '', held ? `${count(held)} wait for room` : '',
  ].filter(Boolean);
}

function chooser(name) {
  const button = make('button', { type: 'button', title: name }, name);
  button.addEventListener('click', () => {
    selected = selected === name ? null : name;
    draw();
  });
  return [button, make('span', { class: 'format' })];
}

function line(values, width, height, most, name) {
  const step = width / (HISTORY - 1);
  let path = '', isDrawn = false;
  values.forEach((value, at) => {
    if (value === null || value === Infinity) { isDrawn = false; return; }
    const x = width - (values.length - 1 - at) * step, y = height - 1 - value / most * (height - 2);
    path += `${isDrawn ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDrawn = true;
  });
  return make('path', { d: path || 'M0 0', class: name });
}

const most = (...lists) => Math.max(...lists.flat().filter(value => value !== null && value !== Infinity), 1e-9);

function spark(disk) {
  const reads = disk.history.map(one => one.reads), writes = disk.history.map(one => one.writes);
  const top = most(reads, writes, [1]);
  const label = `up to ${count(Math.max(...reads))} reads and ${count(Math.max(...writes))} writes a second`;
  return make('svg', { class: 'spark', viewBox: '0 0 150 26', role: 'img', 'aria-label': label },
    line(reads, 150, 26, top, 'read'), line(writes, 150, 26, top, 'write'));
}

function chart(title, keys, lists, shown) {
  const [width, height] = [480, 120];
  const top = most(...lists);
  const names = ['read', 'write'];
  const now = lists.map(list => shown(list.at(-1) ?? null));
  const label = keys.map((key, at) => `${key} ${now[at]}`).join(', ');
  const frame = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none' };
  const picture = make('svg', { ...frame, role: 'img', 'aria-label': `${title}: ${label}` },
    make('line', { class: 'axis', x1: 0, x2: width, y1: height, y2: height }),
    make('line', { class: 'axis', x1: 0, x2: width, y1: 1, y2: 1 }),
    ...lists.map((list, at) => line(list, width, height, top, names[at])));
  const scale = ['2 min ago', `0 to ${shown(top)}`, 'now'].map(text => make('span', {}, text));
  const legend = keys.map((key, at) => make('span', { class: `key key-${names[at]}` }, `${key} ${now[at]}`));
  return make('figure', {}, make('figcaption', {}, title, ...legend), picture, make('p', {}, ...scale));
}

function drawDetail() {
  const disk = disks.get(selected);
  $('detail').hidden = !disk;
  if (!disk) return;
  $('detail-title').textContent = disk.name;
  $('detail-path').textContent = `${disk.format} in ${disk.path}`;
  const of = what => disk.history.map(one => one[what]);
  $('charts').replaceChildren(
    chart('Requests a second', ['reads', 'writes'], [of('reads'), of('writes')], count),
    chart('Latency', ['p50', 'p99'], [of('p50'), of('p99')], duration),
    chart('Data a second', ['read', 'written'], [of('readBytes'), of('writeBytes')], bytes),
    chart('Requests in flight', ['now'], [of('depth')], count));
  const rows = list => list.filter(row => row.all > 0).map(row => make('tr', {},
    make('td', {}, row.first), make('td', {}, row.operation), number(count(row.rate)), number(bytes(row.bytes)),
    ...[.5, .99, .999].map(part => number(duration(quantile(row.buckets, part)))), number(count(row.all))));
  $('requests').replaceChildren(...rows(disk.requests));
  $('stages').replaceChildren(...rows(disk.stages));
}

function drawJobs() {
  $('jobs-section').hidden = latest.jobs.length === 0;
  $('jobs').replaceChildren(...latest.jobs.map(job => {
    const part = job.total ? Math.min(job.copied / job.total, 1) : 1;
    const left = job.rate && job.remaining ? span(job.remaining / job.rate) : '–';
    const bar = make('progress', { max: 1, value: part, 'aria-label': `${job.job}: ${Math.round(part * 100)} %` });
    const status = make('td', job.error ? { class: 'bad' } : {}, job.error ? `${job.status}: ${job.error}` : job.status);
    return make('tr', {}, make('td', {}, `${job.job} (${job.kind})`), make('td', {}, job.disk), make('td', {}, job.target),
      status, make('td', {}, bar, ` ${Math.floor(part * 100)} %`), number(`${bytes(job.rate)}/s`), number(left));
  }));
}

// An event's own words are those of the control socket.
function tell(name, words, isBad) {
  const list = $('events');
  const isSeen = list.scrollTop < 4;
  list.prepend(make('li', {}, make('time', {}, clock(new Date())), make('span', isBad ? { class: 'bad' } : {}, name),
    make('span', {}, words)));
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
  if (isSeen) list.scrollTop = 0;
  $('no-events').hidden = true;
}

function happened({ event, ...fields }) {
  const words = Object.entries(fields).map(([name, value]) => `${name} ${value}`).join(', ');
  tell(event, words, /error|failed|no-space|lost/.test(event) || 'error' in fields);
}

function setLive(isLive) {
  if (isLive && goneSince) tell('page', `connected again; the server was not there since ${clock(goneSince)}`, false);
  if (!isLive && !goneSince) goneSince = new Date();
  if (isLive) goneSince = null;
  $('state').className = isLive ? 'live' : 'gone';
  $('state').textContent = isLive ? 'live' : `no answer since ${clock(goneSince)}; trying again`;
  document.body.classList.toggle('stale', !isLive);
}

function connect() {
  const stream = new EventSource('/events');
  stream.addEventListener('open', () => setLive(true));
  stream.addEventListener('message', ({ data }) => take(JSON.parse(data)));
  stream.addEventListener('happened', ({ data }) => happened(JSON.parse(data)));
  stream.addEventListener('error', () => {
    setLive(false);
    // The browser gives up where it is refused; then it is asked anew.
    stream.close();
    setTimeout(connect, RETRY);
  });
}

document.addEventListener('visibilitychange', () => { if (!document.hidden) draw(); });
connect();
