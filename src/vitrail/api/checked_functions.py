"""Argument-checked versions of load, save, create, adapt and load_recipe, as `import vitrail` has them."""

from vitrail import recipes
from vitrail.api.keyword_errors import name_keywords
from vitrail.weights import adapt as adapting
from vitrail.weights import load as loading
from vitrail.weights import trained as creating

adapt = name_keywords(adapting.adapt)
create = name_keywords(creating.create)
load = name_keywords(loading.load)
load_recipe = name_keywords(recipes.load_recipe)
save = name_keywords(loading.save)
