-- Every change of the lease table, each one atomic. One script, dispatched on ARGV[1], so that the rules stand together.
--
-- ARGV: operation, now ('' = this server's own time), JSON argument object. Answer: JSON object with "code".
-- The pure twin of this file is planner/lease_model.py; tests/conformance runs both against each other.
-- Numbers are doubles here: a token (epoch * 2^32 + count) is exact while the epoch is below 2^21.
local op, given_now, args = ARGV[1], ARGV[2], cjson.decode(ARGV[3])
local P = 'planaria:'
local SLOTS, EXPIRIES, FENCING = P .. 'slots', P .. 'expiries', P .. 'fencing'
local QUARANTINE, NODES, LOCK = P .. 'quarantine', P .. 'nodes', P .. 'coordinator'
local EPOCH_UNIT = 4294967296

local function server_time()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end
local now = given_now ~= '' and tonumber(given_now) or server_time()

local function exact(number) return string.format('%.17g', number) end
local function whole(number) return string.format('%.0f', number) end
local function key(id) return P .. 'lease:' .. id end
local function answer(object) return cjson.encode(object) end -- an empty list comes out as {}, which the reader takes as empty

local function run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

local function read(id)
  local f = redis.call('HMGET', key(id), 'token', 'holder', 'node', 'slots', 'granted', 'expires', 'ttl', 'revoked', 'reason')
  if not f[1] then return nil end
  return {id = id, token = f[1], holder = f[2], node = f[3], slots = f[4], granted = f[5], expires = f[6], ttl = f[7],
          revoked = f[8], reason = f[9]}
end

local function slot_names(lease)
  local names = {}
  for _, index in ipairs(cjson.decode(lease.slots)) do names[#names + 1] = lease.node .. '/' .. whole(index) end
  return names
end

local function set_expiry(id, expires)
  redis.call('HSET', key(id), 'expires', exact(expires))
  redis.call('ZADD', EXPIRIES, exact(expires), id)
end

-- Ends a lease. With a mark its slots go into quarantine until the node's agent says that no process holds them.
local function finish(lease, mark)
  for _, name in ipairs(slot_names(lease)) do
    if redis.call('HGET', SLOTS, name) == lease.id then redis.call('HDEL', SLOTS, name) end
    if mark then redis.call('HSET', QUARANTINE, name, mark) end
  end
  redis.call('DEL', key(lease.id))
  redis.call('ZREM', EXPIRIES, lease.id)
end

local function fenced()
  if not args.fence then return false end
  return redis.call('HGET', LOCK, 'token') ~= args.fence
end

local function quarantine_free(node, count, mark)
  for index = 0, count - 1 do
    local name = node .. '/' .. whole(index)
    if not redis.call('HGET', SLOTS, name) then redis.call('HSET', QUARANTINE, name, mark) end
  end
end

local function all_leases()
  local found = {}
  for _, id in ipairs(redis.call('ZRANGE', EXPIRIES, 0, -1)) do
    local lease = read(id)
    if lease then found[#found + 1] = lease end
  end
  return found
end

local ops = {}

function ops.grant()
  local granted, taken = {}, {}
  if fenced() then return answer({code = 'fenced'}) end
  -- A server that restarted may have lost its last second, tokens included: nothing is granted before the epoch is raised.
  if redis.call('HGET', FENCING, 'run') ~= run_id() then return answer({code = 'restarted'}) end
  local first = read(args.grants[1].id)
  if first then -- the same call again, after a lost answer
    for _, want in ipairs(args.grants) do granted[#granted + 1] = read(want.id) end
    return answer({code = 'ok', leases = granted})
  end
  local seen = {}
  for _, want in ipairs(args.grants) do
    for _, name in ipairs(slot_names(want)) do
      if seen[name] or redis.call('HEXISTS', SLOTS, name) == 1 or redis.call('HEXISTS', QUARANTINE, name) == 1 then
        taken[#taken + 1] = name
      end
      seen[name] = true
    end
  end
  if #taken > 0 then return answer({code = 'taken', slots = taken}) end
  for _, want in ipairs(args.grants) do
    local token = whole(tonumber(redis.call('HINCRBY', FENCING, 'counter', 1)))
    redis.call('HSET', key(want.id), 'token', token, 'holder', want.holder, 'node', want.node, 'slots', want.slots,
      'granted', exact(now), 'ttl', exact(want.ttl), 'revoked', '0', 'reason', want.reason)
    set_expiry(want.id, now + want.ttl)
    for _, name in ipairs(slot_names(want)) do redis.call('HSET', SLOTS, name, want.id) end
    granted[#granted + 1] = read(want.id)
  end
  return answer({code = 'ok', leases = granted})
end

-- A lease that is past its expiry but not yet swept may be renewed: nobody can have got its slots.
function ops.renew()
  local results = {}
  for _, pair in ipairs(args.leases) do
    local f = redis.call('HMGET', key(pair[1]), 'token', 'ttl', 'revoked')
    if f[1] ~= pair[2] then
      results[#results + 1] = {'lost', '0', '0'}
    else
      local expires, revoked = now + tonumber(f[2]), tonumber(f[3])
      if revoked > 0 and revoked <= now then
        results[#results + 1] = {'lost', '0', '0'}
      else
        if revoked > 0 and expires > revoked then expires = revoked end
        set_expiry(pair[1], expires)
        results[#results + 1] = {revoked > 0 and 'revoked' or 'renewed', exact(expires), exact(revoked)}
      end
    end
  end
  return answer({code = 'ok', results = results, now = exact(now)})
end

function ops.revoke()
  local revoked = {}
  if fenced() then return answer({code = 'fenced'}) end
  for _, want in ipairs(args.revocations) do
    local lease = read(want.id)
    if lease then
      local deadline, before = now + want.grace, tonumber(lease.revoked)
      if before == 0 or deadline < before then
        redis.call('HSET', key(want.id), 'revoked', exact(deadline), 'reason', want.reason)
        if tonumber(lease.expires) > deadline then set_expiry(want.id, deadline) end
      end
      revoked[#revoked + 1] = read(want.id)
    end
  end
  return answer({code = 'ok', leases = revoked})
end

function ops.release()
  local lease = read(args.id)
  if not lease or lease.token ~= args.token then return answer({code = 'lost'}) end
  finish(lease, not args.confirmed and lease.token or nil)
  return answer({code = 'ok', leases = {lease}})
end

-- Sweeps what is past its expiry. While no sweep ran for longer than the guard, server or coordinator was away and
-- holders may have been unable to renew: that time does not count against any lease.
function ops.expire()
  if fenced() then return answer({code = 'fenced'}) end
  local before = tonumber(redis.call('HGET', FENCING, 'swept') or '-1')
  redis.call('HSET', FENCING, 'swept', exact(now))
  local ended = {}
  if before < 0 or now - before > args.guard then
    local away = before < 0 and 0 or now - before
    for _, lease in ipairs(all_leases()) do
      local expires, revoked = math.max(tonumber(lease.expires), now + tonumber(lease.ttl)), tonumber(lease.revoked)
      if revoked > 0 then
        revoked = revoked + away
        redis.call('HSET', key(lease.id), 'revoked', exact(revoked))
        expires = math.min(expires, revoked)
      end
      set_expiry(lease.id, expires)
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', exact(now))) do
    local lease = read(id)
    if lease then
      finish(lease, lease.token)
      ended[#ended + 1] = lease
    else
      redis.call('ZREM', EXPIRIES, id)
    end
  end
  return answer({code = 'ok', leases = ended})
end

-- The mark is what the agent saw when it looked: an answer that comes late clears nothing newer.
function ops.confirm()
  local cleared = {}
  for _, pair in ipairs(args.slots) do
    if redis.call('HGET', QUARANTINE, pair[1]) == pair[2] then
      redis.call('HDEL', QUARANTINE, pair[1])
      cleared[#cleared + 1] = pair[1]
    end
  end
  return answer({code = 'ok', slots = cleared})
end

-- A node says hello. Another boot of its agent ends all leases that the former one answered for, but the adopted.
function ops.register()
  local facts, ended = cjson.decode(args.facts), {}
  local before = redis.call('HGET', NODES, args.node)
  local fresh = not before or cjson.decode(before).boot ~= facts.boot
  redis.call('HSET', NODES, args.node, args.facts)
  redis.call('SET', P .. 'heartbeat:' .. args.node, exact(now))
  if fresh then
    if before then
      for _, lease in ipairs(all_leases()) do
        if lease.node == args.node and args.adopt[lease.id] ~= lease.token then
          finish(lease, facts.boot)
          ended[#ended + 1] = lease
        end
      end
    end
    quarantine_free(args.node, facts.slots, facts.boot)
  end
  return answer({code = 'ok', leases = ended, fresh = fresh})
end

-- Takes or keeps the coordinator's lock and raises the epoch. On a server that restarted since, every free slot goes
-- into quarantine: a lease granted in the lost last second may still be in use there.
function ops.lock()
  local owner, expires = redis.call('HGET', LOCK, 'owner'), tonumber(redis.call('HGET', LOCK, 'expires') or '0')
  if owner and owner ~= args.owner and expires > now then return answer({code = 'taken', owner = owner}) end
  local counter = tonumber(redis.call('HGET', FENCING, 'counter') or '0')
  local run = run_id()
  if redis.call('HGET', FENCING, 'run') ~= run then
    local nodes = redis.call('HGETALL', NODES)
    for i = 1, #nodes, 2 do quarantine_free(nodes[i], cjson.decode(nodes[i + 1]).slots, 'run:' .. run .. ':' .. whole(args.epoch)) end
  end
  counter = math.max(counter, args.epoch * EPOCH_UNIT) + 1
  redis.call('HSET', FENCING, 'counter', whole(counter), 'run', run)
  redis.call('HSET', LOCK, 'owner', args.owner, 'token', whole(counter), 'expires', exact(now + args.ttl))
  return answer({code = 'ok', token = whole(counter)})
end

function ops.keep()
  local f = redis.call('HMGET', LOCK, 'owner', 'token')
  if f[1] ~= args.owner or f[2] ~= args.token then return answer({code = 'fenced'}) end
  if redis.call('HGET', FENCING, 'run') ~= run_id() then return answer({code = 'restarted'}) end
  redis.call('HSET', LOCK, 'expires', exact(now + args.ttl))
  return answer({code = 'ok'})
end

function ops.unlock()
  local f = redis.call('HMGET', LOCK, 'owner', 'token')
  if f[1] ~= args.owner or f[2] ~= args.token then return answer({code = 'fenced'}) end
  redis.call('HDEL', LOCK, 'owner', 'expires')
  return answer({code = 'ok'})
end

function ops.list()
  return answer({code = 'ok', leases = all_leases()})
end

if not ops[op] then return redis.error_reply('unknown lease operation ' .. op) end
return ops[op]()
