// Bundles the page into src/shoal/dash/page. Names carry a digest, so that browsers may keep the files for good.
import { build } from "esbuild";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { basename } from "node:path";

const out = "../src/shoal/dash/page";
mkdirSync(out, { recursive: true });
for (const name of readdirSync(out)) rmSync(`${out}/${name}`);

const result = await build({
  entryPoints: { app: "src/main.ts", look: "src/look.css", icon: "src/icon.svg" },
  entryNames: "[name]-[hash]",
  loader: { ".svg": "copy" },
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022", "chrome123", "firefox120", "safari17.5"],
  outdir: out,
  metafile: true,
  legalComments: "eof",
});
const names = Object.keys(result.metafile.outputs).map((path) => basename(path));
const find = (start) => names.find((name) => name.startsWith(start));
const html = readFileSync("src/index.html", "utf8")
  .replace("APP", `/page/${find("app-")}`)
  .replace("LOOK", `/page/${find("look-")}`)
  .replace("ICON", `/page/${find("icon-")}`);
writeFileSync(`${out}/index.html`, html);
console.log(`page: ${names.length + 1} files in ${out}`);
