/** The code in README.md compiles: its blocks are one program. `make test-clients` also runs the first block. */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { test } from "node:test";

const FOLDER = fileURLToPath(new URL("../../", import.meta.url));
const OPTIONS = ["--ignoreConfig", "--strict", "--noEmit", "--target", "es2022", "--module", "nodenext", "--types", "node"];
/** The part of zod that the README uses; the package is not among those of the tests. */
const ZOD = `declare module "zod" {
  export const z: { string(): string; int(): number; object<T>(shape: T): { parse(value: unknown): T } };
}`;

test("the code in the README compiles", (t) => {
  const readme = readFileSync(join(FOLDER, "README.md"), "utf8");
  const blocks = [...readme.matchAll(/^```(?:ts|typescript)\n(.*?)^```$/gms)].map(([, code = ""]) => code);
  assert(blocks.length > 10);
  // Inside the package, so that its own name is found.
  const folder = mkdtempSync(join(FOLDER, "dist", "readme-"));
  t.after(() => rmSync(folder, { recursive: true }));
  const files = [join(folder, "zod.d.ts"), join(folder, "main.ts")];
  writeFileSync(files[0]!, ZOD);
  writeFileSync(files[1]!, blocks.join("\n"));
  const { stdout, status } = spawnSync(join(FOLDER, "node_modules/.bin/tsc"), [...OPTIONS, ...files], { encoding: "utf8" });
  assert.equal(status, 0, stdout);
});
