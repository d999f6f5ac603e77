"use strict";
// The page of the state of the mesh. Its data are the debug pages.

const byId = (id) => document.getElementById(id);
const STATES = {
  Acknowledged: ["good", "acknowledged"], Sent: ["wait", "sent"], Waiting: ["wait", "on its way"],
  Refused: ["bad", "refused"], Unrequested: ["quiet", "not subscribed"],
};
const OBJECT_STATES = {
  Unknown: ["bad", "does not exist"], Awaited: ["wait", "not seen yet"], Invalid: ["bad", "invalid"],
  Unused: ["quiet", "affects no connected proxy"], Pending: ["wait", "on its way"],
  Acknowledged: ["good", "arrived at all proxies"], Refused: ["bad", "refused"], Removed: ["good", "removed"],
};
// The number of rows of a table; the filter finds the others.
const ROWS = 200;

/** Creates an element with a class, text or children. */
function element(name, className, ...children) {
  const created = document.createElement(name);
  if (className) created.className = className;
  created.append(...children.filter((child) => child !== null && child !== undefined));
  return created;
}

function replace(id, ...children) {
  byId(id).replaceChildren(...children);
}

function empty(text) {
  return element("p", "empty", text);
}

function state(name, states = STATES) {
  const [className, text] = states[name] || ["quiet", name];
  return element("span", `state ${className}`, text);
}

/** Creates a table. Cells are texts, numbers or elements. */
function table(caption, heads, rows) {
  if (rows.length === 0) return empty("none");
  const head = element("tr", "", ...heads.map((text) => {
    const cell = element("th", "", text);
    cell.scope = "col";
    return cell;
  }));
  const body = rows.slice(0, ROWS).map((cells) => element("tr", "", ...cells.map((cell, index) => {
    const created = element("td", typeof cell === "number" ? "number" : "", cell instanceof Node ? cell : String(cell));
    created.dataset.head = heads[index];
    return created;
  })));
  const created = element("table", "", element("thead", "", head), element("tbody", "", ...body));
  created.setAttribute("aria-label", caption);
  const scroll = element("div", "scroll stack", created);
  if (rows.length <= ROWS) return scroll;
  return element("div", "", scroll, element("p", "quiet", `${rows.length - ROWS} more; filter to find them.`));
}

function list(texts) {
  if (texts.length === 0) return empty("none");
  const items = texts.slice(0, ROWS).map((text) => element("li", "", text));
  if (texts.length > ROWS) items.push(element("li", "quiet", `${texts.length - ROWS} more`));
  return element("ul", "plain", ...items);
}

const objectName = (object) => `${object.kind} ${object.namespace ? object.namespace + "/" : ""}${object.name}`;
const seconds = (value) => value === undefined ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
const age = (value) => value < 120 ? `${Math.round(value)} s ago` : value < 7200 ? `${Math.round(value / 60)} min ago`
  : `${Math.round(value / 3600)} h ago`;

let mesh = null;
let services = null;

function showOverview() {
  const counts = mesh.counts;
  const figures = [
    ["Proxies", counts.proxies, ""], ["Up to date", counts.acknowledged, "good"], ["On their way", counts.waiting, "wait"],
    ["With refused resources", counts.refused, "bad"], ["Revision", mesh.revision, ""],
  ];
  replace("figures", ...figures.map(([name, value, className]) =>
    element("div", "", element("dt", "", name), element("dd", value ? className : "", String(value)))));
  const parts = [["good", counts.acknowledged], ["wait", counts.waiting], ["bad", counts.refused]];
  replace("bar", ...parts.filter(([, value]) => value > 0).map(([className, value]) => {
    const part = element("span", className);
    part.style.flexGrow = value;
    return part;
  }));
  byId("bar").setAttribute("aria-label",
    `${counts.acknowledged} of ${counts.proxies} proxies up to date, ${counts.waiting} on their way, ${counts.refused} with refused resources`);
  replace("refusals", table("Refused resources", ["Type", "Resource", "Reason", "Because of", "Proxies", "Withheld"],
    mesh.refusals.map((it) => [it.type, it.name, it.reason, it.blamed.map(objectName).join(", ") || "searching…",
      it.proxies, it.quarantined ? "until it changes" : "no"])));
  replace("pushes", table("Last pushes", ["Revision", "When", "Cause", "Waited", "Worked", "Resources", "Proxies", "Answered"],
    mesh.pushes.slice(0, 15).map((it) => [it.revision, age(it.ageSeconds), cause(it), seconds(it.waitedSeconds),
      seconds(it.workedSeconds), it.built, it.proxies, answered(it)])));
  replace("diagnostics", list(mesh.diagnostics));
}

function cause(push) {
  const objects = push.objects.map(objectName);
  if (objects.length > 0 && objects.length <= 3) return objects.join(", ");
  return Object.entries(push.kinds).map(([kind, number]) => `${number} ${kind}`).join(", ") || `${push.changes} changes`;
}

function answered(push) {
  if (push.unanswered > 0) return element("span", "wait", `${push.unanswered} missing`);
  if (push.refused > 0) return element("span", "bad", `${push.refused} refused`);
  return push.proxies > 0 ? seconds(push.seconds) : "–";
}

function showProxies() {
  const wanted = byId("proxy-filter").value.toLowerCase();
  const rows = mesh.proxies.filter((it) =>
    `${it.proxy} ${it.namespace} ${it.type} ${it.cluster} ${it.version} ${it.state}`.toLowerCase().includes(wanted));
  replace("proxy-list", table("Proxies", ["Proxy", "State", "Type", "Cluster", "Version", "Error"], rows.map((it) => {
    const button = element("button", "", it.proxy);
    button.type = "button";
    button.addEventListener("click", () => showProxy(it.proxy));
    return [button, state(it.state), it.type, it.cluster, it.version, (it.errors || []).join("; ")];
  })));
}

async function showProxy(id) {
  replace("proxy-detail", element("h3", "", id), empty("loading…"));
  const dump = await load(`/debug/config_dump?proxyID=${encodeURIComponent(id)}`);
  const sync = (await load("/debug/syncz"))?.find((row) => row.proxy === id);
  const configs = (dump?.configs || []).map((config) => {
    const type = config["@type"].split(".").pop();
    const parts = Object.entries(config).filter(([, value]) => Array.isArray(value));
    return [type, parts.map(([name, value]) => `${value.length} ${name}`).join(", ")];
  });
  const types = Object.entries(sync?.resources || {}).map(([url, it]) =>
    [url.split(".").pop(), it.sent || "–", it.acked || "–", it.sentTime || "–", it.lastError || ""]);
  replace("proxy-detail", element("h3", "", id),
    table("Subscriptions", ["Type", "Sent", "Acknowledged", "Time", "Last error"], types),
    element("h3", "", "Configuration"), table("Configuration", ["Part", "Resources"], configs));
  byId("proxy-detail").scrollIntoView({ block: "nearest" });
}

async function showServices() {
  services ??= await load("/debug/registryz");
  const wanted = byId("service-filter").value.toLowerCase();
  const rows = (services || []).map((it) => ({
    host: it.hostname || it.Hostname || "",
    namespace: it.Attributes?.Namespace || "",
    ports: (it.ports || it.Ports || []).map((port) => `${port.port ?? port.Port} ${port.protocol ?? port.Protocol ?? ""}`),
  }));
  const shown = rows.filter((it) => it.host.toLowerCase().includes(wanted));
  replace("service-list", table("Services", ["Host", "Namespace", "Ports"],
    shown.map((it) => [it.host, it.namespace, it.ports.join(", ")])));
}

async function showObject(event) {
  event.preventDefault();
  const query = new URLSearchParams(new FormData(byId("question")));
  replace("answer", empty("asking…"));
  const response = await fetch(`/debug/status?${query}`);
  if (!response.ok) return replace("answer", element("p", "bad", await response.text()));
  const report = await response.json();
  const counts = report.counts;
  const rows = report.proxies.flatMap((proxy) => proxy.resources.map((it) =>
    [proxy.proxy, state(it.state), it.type, it.name, it.effect, it.reason || ""]));
  replace("answer",
    element("p", "", element("strong", "", objectName(report.object)), " ", state(report.state, OBJECT_STATES),
      counts.proxies ? ` – ${counts.acknowledged} of ${counts.proxies} proxies acknowledged it` : ""),
    list(report.diagnostics), table("Proxies of the object",
      ["Proxy", "State", "Type", "Resource", "Effect", "Reason"], rows));
}

async function load(url) {
  const response = await fetch(url);
  return response.ok ? response.json() : null;
}

async function showDetails() {
  const [clusters, networks, notes] = await Promise.all(["clusterz", "networkz", "notez"].map((page) => load(`/debug/${page}`)));
  replace("clusters", table("Clusters", ["Cluster", "State"], (clusters || []).map((it) => [it.id, it.syncStatus])));
  replace("networks", table("Network gateways", ["Network", "Address"],
    (networks || []).map((it) => [it.Network, `${it.Addr}:${it.Port}`])));
  replace("notes", list((notes || []).map((it) => `${it.code}: ${it.detail}`)));
}

function showView() {
  const views = ["overview", "proxies", "services", "object"];
  const wanted = views.find((view) => location.hash === `#${view}`) || "overview";
  for (const view of views) byId(view).hidden = view !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (wanted === "proxies" && mesh) showProxies();
  if (wanted === "services") showServices();
}

function follow() {
  const events = new EventSource("/debug/status_events");
  let shown = -1;
  events.onmessage = (event) => {
    mesh = JSON.parse(event.data);
    byId("connection").textContent = "live";
    showOverview();
    if (!byId("proxies").hidden) showProxies();
    if (shown !== mesh.revision) {
      shown = mesh.revision;
      services = null;
      showDetails();
    }
  };
  events.onerror = () => { byId("connection").textContent = "connection lost, trying again…"; };
}

addEventListener("hashchange", showView);
byId("proxy-filter").addEventListener("input", () => mesh && showProxies());
byId("service-filter").addEventListener("input", showServices);
byId("question").addEventListener("submit", showObject);
showView();
follow();
