// Prints what npm's `ratelimit-header-parser` reads in the response of a URL.
import { parseRateLimit } from "ratelimit-header-parser";
const response = await fetch(process.argv[2]);
const read = parseRateLimit(response.headers);
const wait = read ? Math.round((read.reset - Date.now()) / 1000) : undefined;
console.log(read ? `limit ${read.limit}, remaining ${read.remaining}, reset in ${wait} s` : "nothing");
