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
  Incomplete: ["wait", "unknown in parts: replicas of istiod did not answer"],
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

/** Replaces the content of an element. A link or heading that had the focus has it again, if it is still there. */
function replace(id, ...children) {
  const container = byId(id);
  const active = container.contains(document.activeElement) ? document.activeElement : null;
  container.replaceChildren(...children);
  if (!active) return;
  const selector = active.matches("a") ? `a[href="${CSS.escape(active.getAttribute("href"))}"]` : ".detail";
  container.querySelector(selector)?.focus({ preventScroll: true });
}

function empty(text) {
  return element("p", "empty", text);
}

function state(name, states = STATES) {
  const [className, text] = states[name] || ["quiet", name];
  return element("span", `state ${className}`, text);
}

/** Creates a link to a view of this page. */
function link(text, ...path) {
  const created = element("a", "", text);
  created.href = `#${path.map(encodeURIComponent).join("/")}`;
  return created;
}

/** Creates the heading of details. It receives the focus when they are opened. */
function heading(text) {
  const created = element("h3", "detail", text);
  created.tabIndex = -1;
  return created;
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

/** Creates a list of texts or elements. */
function list(texts, none = "none") {
  if (texts.length === 0) return empty(none);
  const items = texts.slice(0, ROWS).map((text) => element("li", "", text));
  if (texts.length > ROWS) items.push(element("li", "quiet", `${texts.length - ROWS} more`));
  return element("ul", "plain", ...items);
}

/** The path of the view that is shown: its name, and what it is about. */
const path = () => location.hash.slice(1).split("/").map(decodeURIComponent);
const objectNames = (objects) => objects.map(objectName).join(", ");
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
  replace("proxy-list", table("Proxies", ["Proxy", "State", "Type", "Cluster", "Version", "Error"], rows.map((it) =>
    [link(it.proxy, "proxies", it.proxy), state(it.state), it.type, it.cluster, it.version, (it.errors || []).join("; ")])));
}

/** Shows the details of a view. Their heading receives the focus if they were opened by a link. */
function showDetail(id, title, isOpened, ...parts) {
  const head = heading(title);
  const [view] = path();
  const back = element("p", "", link(`All ${view}`, view));
  replace(id, back, head, ...parts);
  if (isOpened) head.focus();
}

async function showProxy(id, isOpened) {
  if (isOpened) replace("proxy-detail", heading(id), empty("loading…"));
  const [proxy, dump, rows] = await Promise.all([
    load(`/debug/proxyz?proxyID=${encodeURIComponent(id)}`),
    load(`/debug/config_dump?proxyID=${encodeURIComponent(id)}`), load("/debug/syncz")]);
  if (path()[1] !== id) return;
  if (!proxy) return showDetail("proxy-detail", id, isOpened, empty("not connected to this replica"));
  const sync = (rows || []).find((row) => row.proxy === id);
  const configs = (dump?.configs || []).map((config) => {
    const type = config["@type"].split(".").pop();
    const parts = Object.entries(config).filter(([, value]) => Array.isArray(value));
    return [type, parts.map(([name, value]) => `${value.length} ${name}`).join(", ")];
  });
  const types = Object.entries(sync?.resources || {}).map(([url, it]) =>
    [url.split(".").pop(), it.sent || "–", it.acked || "–", it.sentTime || "–", it.lastError || ""]);
  const refusals = proxy.refusals.map((it) => [it.type, it.name, it.reason, objectNames(it.blamed) || "searching…",
    it.quarantined ? "until it changes" : "no"]);
  const serves = proxy.services.map((it) => element("span", "", link(it.host, "services", it.host), ` ${it.ports.join(", ")}`));
  showDetail("proxy-detail", id, isOpened,
    facts([
      ["Scope", proxy.sidecar ? objectName(proxy.sidecar) : `default of ${proxy.namespace}`],
      ["Visible services", proxy.visibleServices],
      ["Group", `${proxy.group.proxies} ${proxy.group.proxies === 1 ? "proxy" : "proxies"} with the same configuration`],
      ["Resources", proxy.group.resources], ["Connected", proxy.connectedAt],
    ]),
    element("h4", "", "Services that it serves"), list(serves),
    element("h4", "", "Refused resources"),
    table("Refused resources of the proxy", ["Type", "Resource", "Reason", "Because of", "Withheld"], refusals),
    element("h4", "", "Subscriptions"),
    table("Subscriptions", ["Type", "Sent", "Acknowledged", "Time", "Last error"], types),
    element("h4", "", "Configuration"), table("Configuration", ["Part", "Resources"], configs));
}

/** Creates a list of facts: pairs of names and values. */
function facts(pairs) {
  return element("dl", "facts", ...pairs.map(([name, value]) =>
    element("div", "", element("dt", "", name), element("dd", "", value instanceof Node ? value : String(value)))));
}

async function showServices() {
  services ??= await load("/debug/registryz");
  const wanted = byId("service-filter").value.toLowerCase();
  const rows = (services || []).map((it) => ({
    host: it.hostname || "",
    namespace: it.Attributes?.Namespace || "",
    ports: (it.ports || []).map((port) => `${port.port} ${port.protocol ?? ""}`),
  }));
  const shown = rows.filter((it) => it.host.toLowerCase().includes(wanted));
  replace("service-list", table("Services", ["Host", "Namespace", "Ports"],
    shown.map((it) => [link(it.host, "services", it.host, it.namespace), it.namespace, it.ports.join(", ")])));
}

/** The modes of mutual TLS with their states: only STRICT refuses plaintext. */
const MODES = { STRICT: "good", PERMISSIVE: "wait", DISABLE: "bad" };

function modes(names) {
  if (names.length === 0) return element("span", "quiet", "no mutual TLS");
  return element("span", "", ...names.map((name) => element("span", `state ${MODES[name]}`, `${name} `)));
}

async function showService(host, namespace, isOpened) {
  if (isOpened) replace("service-detail", heading(host), empty("loading…"));
  const query = new URLSearchParams({ host, namespace: namespace || "" });
  const found = await load(`/debug/servicez?${query}`);
  if (path()[1] !== host) return;
  if (!found) return showDetail("service-detail", host, isOpened, empty("no service has this host"));
  showDetail("service-detail", host, isOpened, ...found.flatMap(service));
}

/** Creates the details of a service. */
function service(it) {
  const { visibility, waypoint, destinationRule: rule } = it;
  const exported = visibility.exportTo.includes("*") ? "all namespaces" : visibility.exportTo.join(", ") || "no namespace";
  const denies = it.workloads.filter((workload) => workload.defaultAction === "deny").length;
  const decision = it.workloads.length === 0 ? "–" : denies === 0 ? "requests are allowed unless a DENY policy matches"
    : `${denies} of ${it.workloads.length} workloads allow only what an ALLOW policy permits`;
  const tls = [...new Set(it.ports.flatMap((port) => Object.keys(port.mutualTls)))];
  const more = (count, rows) => count > rows.length ? [element("p", "quiet", `${count - rows.length} more`)] : [];
  return [
    facts([
      ["Declared by", objectNames(it.objects)], ["Exported to", exported],
      ["Seen by", `${visibility.seeing} of ${visibility.proxies} connected proxies`], ["Mutual TLS", modes(tls)],
      ["Authorization", decision],
      ["Waypoint", waypoint ? `${objectName(waypoint.gateway)}: ${waypoint.state}` : "none"],
      ["DestinationRule", rule ? `${objectNames(rule.objects)}${rule.tls ? `, TLS ${rule.tls}` : ""}${
        rule.subsets.length ? `, subsets ${rule.subsets.join(", ")}` : ""}` : "none"],
    ]),
    element("h4", "", "Ports"),
    table("Ports", ["Port", "Name", "Protocol", "Endpoints", "Mutual TLS"], it.ports.map((port) =>
      [port.number, port.name, port.protocol, port.endpoints, modes(Object.keys(port.mutualTls))])),
    element("h4", "", "Workloads"),
    table("Workloads", ["Workload", "Cluster", "Identity", "Endpoints", "Proxy", "Mutual TLS by port", "Other requests"],
      it.workloads.map((workload) => [`${workload.namespace}/${workload.name}`, workload.cluster, workload.identity || "–",
        workload.endpoints, workload.transport,
        Object.entries(workload.mutualTls).map(([port, mode]) => `${port} ${mode}`).join(", ") || "–",
        workload.defaultAction === "deny" ? "denied" : "allowed"])),
    ...more(it.workloadCount, it.workloads),
    element("h4", "", "Policies"),
    table("Policies", ["Policy", "Action", "Where", "Rules"], it.policies.map((policy) =>
      [objectName(policy), `${policy.action || ""}${policy.dryRun ? " (logged only)" : ""}`,
        policy.at === "waypoint" ? "waypoint" : policy.workloads.join(", ") || "all workloads",
        policy.action ? list(policy.rules, policy.action === "ALLOW" ? "no request" : "none") : ""])),
    element("h4", "", "Gateways"),
    table("Gateways", ["Gateway", "Hosts", "Servers"], it.gateways.map((gateway) =>
      [objectNames(gateway.objects), gateway.hosts.join(", "), gateway.servers.map((server) =>
        `${server.port} ${server.protocol}${server.tls ? ` (TLS ${server.tls})` : ""}: ${server.hosts.join(", ")}`).join("; ")])),
    element("h4", "", "Routes"),
    table("Routes", ["Object", "Hosts", "Gateways", "Applies to"], it.routes.map((route) =>
      [objectNames(route.objects), route.hosts.join(", "), route.gateways.join(", "),
        route.ownHost ? "requests to this host" : "requests to other hosts that it leads here"])),
    element("h4", "", "Clients"),
    table("Clients", ["Namespace", "Scope", "Proxies", "Sees it"], visibility.scopes.map((scope) =>
      [scope.namespace, scope.sidecar ? objectName(scope.sidecar) : scope.gateway ? "gateway" : "default", scope.proxies,
        scope.hiddenBy ? element("span", "bad", `no: ${scope.hiddenBy}`) : element("span", "good", "yes")])),
    ...more(visibility.scopeCount, visibility.scopes),
  ];
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

/** The time of the last request for certificates. They change seldom, and reading them all takes time. */
let certificatesAt = 0;

async function showCertificates() {
  if (Date.now() - certificatesAt < 60_000) return;
  certificatesAt = Date.now();
  const rows = await load("/debug/certificatez");
  const day = 86400;
  const expiry = (it) => {
    if (it.error) return element("span", "state bad", it.error);
    const left = it.expiresInSeconds;
    const [className, text] = left < 0 ? ["bad", "expired"] : left < 7 * day ? ["bad", `in ${(left / day).toFixed(1)} days`]
      : left < 30 * day ? ["wait", `in ${Math.round(left / day)} days`] : ["good", `in ${Math.round(left / day)} days`];
    return element("span", `state ${className}`, text);
  };
  replace("certificates", table("Certificates that expire first", ["Certificate", "Subject", "Expires", "Time left"],
    (rows || []).slice(0, 15).map((it) => [it.object ? `${objectName(it.object)}: ${it.key}` : it.kind, it.subject,
      it.expires || "–", expiry(it)])));
}

async function showOverviewPages() {
  showCertificates();
  const [clusters, networks, notes] = await Promise.all(["clusterz", "networkz", "notez"].map((page) => load(`/debug/${page}`)));
  replace("clusters", table("Clusters", ["Cluster", "State"], (clusters || []).map((it) => [it.id, it.syncStatus])));
  replace("networks", table("Network gateways", ["Network", "Address"],
    (networks || []).map((it) => [it.Network, `${it.Addr}:${it.Port}`])));
  replace("notes", list((notes || []).map((it) => `${it.code}: ${it.detail}`)));
}

/** Shows the proxies or services, or the one that the address names. */
function showRows(isOpened) {
  const [view, name, namespace] = path();
  if (view !== "proxies" && view !== "services") return;
  const kind = view === "proxies" ? "proxy" : "service";
  byId(`${kind}-browse`).hidden = Boolean(name);
  if (!name) {
    replace(`${kind}-detail`);
    if (view === "services") showServices();
    else if (mesh) showProxies();
  } else if (view === "services") showService(name, namespace, isOpened);
  else showProxy(name, isOpened);
}

function showView() {
  const views = ["overview", "proxies", "services", "object"];
  const wanted = views.find((view) => path()[0] === view) || "overview";
  for (const view of views) byId(view).hidden = view !== wanted;
  for (const anchor of document.querySelectorAll("nav a")) {
    if (anchor.hash === `#${wanted}`) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  showRows(true);
}

function follow() {
  const events = new EventSource("/debug/status_events");
  let [shown, shownProxy] = [-1, ""];
  events.onmessage = (event) => {
    mesh = JSON.parse(event.data);
    byId("connection").textContent = "live";
    showOverview();
    const [view, name] = path();
    if (view === "proxies" && !name) showProxies();
    // An answer of the proxy changes its row, and not the revision.
    const proxy = view === "proxies" && name ? JSON.stringify(mesh.proxies.find((it) => it.proxy === name)) : "";
    const hasChanged = shown !== mesh.revision;
    if (shown !== -1 && (hasChanged || proxy !== shownProxy)) {
      if (hasChanged) services = null;
      showRows(false);
    }
    [shown, shownProxy] = [mesh.revision, proxy];
    if (!hasChanged) return;
    showOverviewPages();
  };
  events.onerror = () => { byId("connection").textContent = "connection lost, trying again…"; };
}

addEventListener("hashchange", showView);
// The address names the view, so it must stay.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
byId("proxy-filter").addEventListener("input", () => mesh && showProxies());
byId("service-filter").addEventListener("input", showServices);
byId("question").addEventListener("submit", showObject);
showView();
follow();
